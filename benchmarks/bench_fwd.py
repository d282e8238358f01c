"""Kernel time of the forward on a GPU, against torch's FlashAttention-2 and cuDNN SDPA.

Run: python benchmarks/bench_fwd.py [--json FILE]

Every call is captured in a CUDA graph and its replays are timed with events, so that Python does
not count. Back-ends take turns; the table shows medians as TFLOP/s (4 * batch * heads * seqlen^2 *
head_dim operations, causal half of them) and our rate over that of FlashAttention-2. 16k tokens,
hidden 2048, random bf16; results are compared on the measured data.
"""

import argparse
import json
import statistics

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

import neginf

TOKENS, HIDDEN = 16384, 2048
PEERS = {
    "torch FA-2": SDPBackend.FLASH_ATTENTION,
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
}


def neginf_attention(q, k, v, causal):
    return neginf.flash_attn_func(q, k, v, causal=causal)


def torch_attention(backend):
    def attend(q, k, v, causal):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return attend


def capture(call):
    """A graph of the call, and its result."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        call()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    graph.replay()
    return graph, result


def replay_ms(graph):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(head_dim, causal, seqlen, rounds):
    """TFLOP/s of each back-end."""
    shape = (TOKENS // seqlen, seqlen, HIDDEN // head_dim, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    calls = {"neginf": neginf_attention, **{n: torch_attention(b) for n, b in PEERS.items()}}
    captured = {n: capture(lambda f=f: f(q, k, v, causal)) for n, f in calls.items()}
    for _, result in captured.values():
        torch.testing.assert_close(result, captured["torch FA-2"][1], rtol=2e-2, atol=2e-2)
    samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (graph, _) in captured.items():
            samples[name].append(replay_ms(graph))
    operations = 4 * TOKENS * HIDDEN * seqlen / (2 if causal else 1)
    return {name: operations / statistics.median(ms) / 1e9 for name, ms in samples.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 4096, 16384])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_fwd.py measures GPU kernels, and torch sees no GPU")

    torch.manual_seed(0)
    table = Table(title=f"forward, TFLOP/s, {torch.cuda.get_device_name()}")
    for column in ("head_dim", "mask", "seqlen", "neginf", *PEERS, "neginf / FA-2"):
        table.add_column(column, justify="right")
    results = []
    for head_dim in args.head_dims:
        for causal in (False, True):
            mask = "causal" if causal else "full"
            for seqlen in args.seqlens:
                rates = measure(head_dim, causal, seqlen, args.rounds)
                ratio = rates["neginf"] / rates["torch FA-2"]
                numbers = (f"{rate:.0f}" for rate in rates.values())
                table.add_row(str(head_dim), mask, str(seqlen), *numbers, f"{ratio:.2f}")
                results.append({"head_dim": head_dim, "mask": mask, "seqlen": seqlen, **rates})
    Console().print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
