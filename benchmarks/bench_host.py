"""Host time of one call on a tiny problem: what an eager user waits for before the GPU matters.

Run: python benchmarks/bench_host.py [--json FILE]

Needs a GPU. Blocks of calls of neginf and of torch's FlashAttention-2 and cuDNN SDPA alternate; the
table shows the median time per call, the queue being drained between blocks and not inside them.
"""

import argparse
import json
import statistics
import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench
import neginf

CALLS_PER_BLOCK = 50

# What each is called with: a function, whether it wants heads first, and the SDPA back-end to pin
# (outside the timed region, as is the transposition).
CALLS = {
    "neginf": (neginf.flash_attn_func, False, None),
    "torch FA-2": (F.scaled_dot_product_attention, True, SDPBackend.FLASH_ATTENTION),
    "torch cuDNN": (F.scaled_dot_product_attention, True, SDPBackend.CUDNN_ATTENTION),
}


def run_block(name, tensors):
    """Seconds per call, and the last result in (batch, seqlen, heads, head_dim)."""
    function, heads_first, backend = CALLS[name]
    if heads_first:
        tensors = [x.transpose(1, 2) for x in tensors]
    with sdpa_kernel(backend) if backend else nullcontext():
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS_PER_BLOCK):
            out = function(*tensors)
        elapsed = time.perf_counter() - start
        torch.cuda.synchronize()
    return elapsed / CALLS_PER_BLOCK, out.transpose(1, 2) if heads_first else out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--blocks", type=int, default=41)
    args = parser.parse_args()
    bench.need_gpu("bench_host.py")

    results = {}
    for requires_grad in (False, True):
        tensors = [
            torch.randn(
                1, 64, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=requires_grad
            )
            for _ in range(3)
        ]
        outs = {name: run_block(name, tensors)[1] for name in CALLS}  # warm-up
        bench.check_agreement({name: {"out": out} for name, out in outs.items()})
        samples = {name: [] for name in CALLS}
        for _ in range(args.blocks):
            for name in CALLS:
                samples[name].append(run_block(name, tensors)[0])
        results["with grad" if requires_grad else "without grad"] = {
            name: statistics.median(times) * 1e6 for name, times in samples.items()
        }

    table = Table(title=f"host time per forward call, us, {torch.cuda.get_device_name()}")
    table.add_column("inputs")
    for name in CALLS:
        table.add_column(name, justify="right")
    table.add_column("neginf / torch FA-2", justify="right")
    for inputs, row in results.items():
        ratio = row["neginf"] / row["torch FA-2"]
        table.add_row(inputs, *(f"{row[name]:.1f}" for name in CALLS), f"{ratio:.2f}")
    Console().print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
