"""Context-parallel attention over GPUs against one GPU, forward and forward + backward.

Run: torchrun --nproc-per-node 2 benchmarks/bench_ring.py [--tokens 65536 --heads 16 --json FILE]

One causal sequence, spread over the GPUs in zigzag order. The table shows ms, the speed-up over
one GPU that does all of it, and the largest error of a row of out, dq, dk, dv against that GPU's,
over the norm of a row. All GPUs measure at the same time: the ring's time is that of the slowest,
one GPU's that of the fastest. Calls are eager, as in training, and take turns in each round.
"""

import argparse
import json
import os
import statistics

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import bench
import neginf
from neginf.distributed import SequenceSharding, all_gather_attention, ring_attention

METHODS = {"ring": ring_attention, "all_gather": all_gather_attention}
ONE = "one GPU"
TOLERANCE = 2e-2


def calls_of(options, device):
    """{method: (leaves, dout, attention)}, with the tensors that each needs."""
    torch.manual_seed(0)
    shapes = [(1, options.tokens, heads, options.head_dim) for heads in head_counts(options)]
    whole = [torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes]
    sharding = SequenceSharding(options.tokens)
    parts = [sharding.shard(tensor) for tensor in whole]
    calls = {ONE: (whole, lambda q, k, v: neginf.flash_attn_func(q, k, v, causal=True))}
    for name in options.methods:
        calls[name] = (
            parts,
            lambda q, k, v, method=METHODS[name]: method(q, k, v, sharding, causal=True),
        )
    prepared = {}
    for name, (tensors, function) in calls.items():
        *leaves, dout = (tensor.clone() for tensor in tensors)
        prepared[name] = [leaf.requires_grad_() for leaf in leaves], dout, function
    return sharding, prepared


def head_counts(options):
    """Of q, k, v and dout."""
    return options.heads, options.heads_k, options.heads_k, options.heads


def run(leaves, dout, function, backward):
    if not backward:
        with torch.no_grad():
            return [function(*leaves)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def errors_of(sharding, calls):
    """{method: {tensor: error}}, the largest over all ranks."""
    one = run(*calls[ONE], backward=True)
    errors = {}
    for name in (name for name in calls if name != ONE):
        got = run(*calls[name], backward=True)
        rows = [
            bench.worst_row_error(part, sharding.shard(whole))
            for part, whole in zip(got, one, strict=True)
        ]
        # The largest of some numbers may leave out a NaN, over ranks and in Python.
        rows = torch.tensor(rows, device=got[0].device).nan_to_num(nan=torch.inf)
        dist.all_reduce(rows, dist.ReduceOp.MAX)
        errors[name] = dict(zip(("out", "dq", "dk", "dv"), rows.tolist(), strict=True))
    return errors


def sample_ms(call, backward):
    """From the moment on when all GPUs are ready."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.all_reduce(torch.zeros(1, device="cuda"))
    start.record()
    run(*call, backward)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(calls, backward, rounds):
    """{method: ms}, the same on every rank."""
    samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(sample_ms(call, backward))
    times = {}
    for name, ms in samples.items():
        median = torch.tensor(statistics.median(ms), device="cuda")
        dist.all_reduce(median, dist.ReduceOp.MIN if name == ONE else dist.ReduceOp.MAX)
        times[name] = median.item()
    return times


def operations(options, backward):
    forward = 2 * options.heads * options.tokens**2 * options.head_dim
    return forward * (3.5 if backward else 1)


def report(options, times, errors):
    title = (
        f"{options.tokens} tokens, {options.heads}/{options.heads_k} heads of "
        f"{options.head_dim}, causal, bfloat16, {dist.get_world_size()} x "
        f"{torch.cuda.get_device_name()}"
    )
    table = Table(title=title)
    for column in ("", "pass", "ms", "TFLOP/s per GPU", "speed-up", "errors"):
        table.add_column(column, justify="right")
    records = []
    for what, of_methods in times.items():
        for name, ms in of_methods.items():
            gpus = 1 if name == ONE else dist.get_world_size()
            rate = operations(options, what != "forward") / ms / 1e9 / gpus
            error = errors.get(name, {})
            table.add_row(
                name, what, f"{ms:.2f}", f"{rate:.0f}", f"{of_methods[ONE] / ms:.3f}",
                " ".join(f"{k} {v:.1e}" for k, v in error.items()),
            )  # fmt: skip
            records.append({"method": name, "pass": what, "ms": ms, "gpus": gpus, **error})
    Console(width=140).print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"title": title, "results": records}, file, indent=2)


def options_of(doc):
    options = argparse.ArgumentParser(description=doc.splitlines()[0])
    options.add_argument("--json", metavar="FILE", help="write the results here")
    options.add_argument("--rounds", type=int, default=11, help="samples per number")
    options.add_argument("--tokens", type=int, default=65536)
    options.add_argument("--heads", type=int, default=16)
    options.add_argument("--heads-k", type=int, default=None, help="as many as --heads")
    options.add_argument("--head-dim", type=int, default=128)
    options.add_argument("--methods", type=bench.choice_of(METHODS), default=list(METHODS))
    return options


def main():
    options = options_of(__doc__).parse_args()
    options.heads_k = options.heads_k or options.heads
    bench.need_gpu("bench_ring.py")
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("bench_ring.py is run by torchrun, a process for each GPU")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # Or transfers wait until a kernel that fills the GPU ends.
    priority = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group("nccl", device_id=device, pg_options=priority)
    sharding, calls = calls_of(options, device)
    errors = errors_of(sharding, calls)
    times = {
        "forward": measure(calls, False, options.rounds),
        "forward + backward": measure(calls, True, options.rounds),
    }
    if dist.get_rank() == 0:
        report(options, times, errors)
    dist.destroy_process_group()
    worst = max(max(of_method.values()) for of_method in errors.values())
    if not worst <= TOLERANCE:
        raise SystemExit(f"the results differ from one GPU's by {worst:.3g} of a row")


if __name__ == "__main__":
    main()
