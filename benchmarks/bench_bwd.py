"""Kernel time of the backward on a GPU, against torch's SDPA and the attention libraries installed.

Run: python benchmarks/bench_bwd.py [--head-dims 64 128 --masks causal --deterministic --json FILE]

As bench_fwd.py, with 2.5 times its operations. The forward runs once, outside the graph; what is
timed is autograd.grad of it, that is every kernel between dout and dq, dk, dv.
"""

import attention

if __name__ == "__main__":
    attention.main("bench_bwd.py", __doc__, backward=True)
