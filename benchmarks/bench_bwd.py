"""Kernel time of the backward on a GPU, against torch's SDPA and the attention libraries installed.

Run: python benchmarks/bench_bwd.py [--head-dims 64 128 --masks causal --deterministic --json FILE]

As bench_fwd.py, with 3 * head_dim + 2 * head_dim_v for its last factor, which is 2.5 times as much
where the two are equal. The forward runs once, outside the graph; what is timed is autograd.grad of
it, that is every kernel between dout and dq, dk, dv.
"""

import attention

if __name__ == "__main__":
    attention.main("bench_bwd.py", __doc__, backward=True)
