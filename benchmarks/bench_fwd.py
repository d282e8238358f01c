"""Kernel time of the forward on a GPU, against torch's SDPA and the attention libraries installed.

Run: python benchmarks/bench_fwd.py [--head-dims 64 128 --masks causal --json FILE --plot FILE.png]

The table shows TFLOP/s (2 * batch * heads * seqlen^2 * (head_dim + head_dim_v) operations, causal
half of them), beside a bf16 matmul of 8192^3 in the same rounds, and our rate over that of the best
peer, of torch's FlashAttention-2 and of the matmul. 16k tokens, hidden 2048, random bf16; all
back-ends are checked against each other on the measured data. bench.py says how time is taken.
"""

import attention

if __name__ == "__main__":
    attention.main("bench_fwd.py", __doc__, backward=False)
