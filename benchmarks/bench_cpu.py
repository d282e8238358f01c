"""CPU time of neginf against torch's scaled_dot_product_attention, forward and backward.

Run: python benchmarks/bench_cpu.py [--seqlen 4096] [--heads 16] [--head-dim 64]

Calls of the two are interleaved; the table shows medians and their ratio. Correctness is checked on
the measured data.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import neginf


def torch_attention(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def neginf_attention(q, k, v, causal):
    return neginf.flash_attn_func(q, k, v, causal=causal)


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved_medians(functions, repeats):
    for function in functions:
        function()
    samples = [[seconds(function) for function in functions] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*samples, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    table = Table(title=f"{args.seqlen} x {args.seqlen}, {args.heads} heads, d{args.head_dim}, "
                        f"{torch.get_num_threads()} threads")  # fmt: skip
    for column in ("dtype", "mask", "pass", "neginf ms", "torch ms", "neginf / torch"):
        table.add_column(column, justify="right")
    for dtype in (torch.float32, torch.bfloat16):
        shape = (1, args.seqlen, args.heads, args.head_dim)
        q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
        dout = torch.randn(shape, dtype=dtype)
        for causal in (False, True):
            outs = [f(q, k, v, causal) for f in (neginf_attention, torch_attention)]
            torch.testing.assert_close(*outs, rtol=0, atol=2e-2 if dtype.itemsize == 2 else 1e-5)
            passes = {
                "forward": [
                    lambda f=f: f(q.detach(), k.detach(), v.detach(), causal)  # noqa: B023
                    for f in (neginf_attention, torch_attention)
                ],
                "backward": [
                    lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)  # noqa: B023
                    for out in outs
                ],
            }
            for name, functions in passes.items():
                ours, theirs = interleaved_medians(functions, args.repeats)
                table.add_row(
                    str(dtype).removeprefix("torch."), "causal" if causal else "full", name,
                    f"{ours * 1e3:.0f}", f"{theirs * 1e3:.0f}", f"{ours / theirs:.2f}",
                )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
