"""Bytes per second of attention over a cache on a GPU, against a device copy in the same run.

Run: python benchmarks/bench_decode.py [--batch 16 --seqlens 8192 --heads 32/8 --page-sizes 0 16]

A decode step is bound by memory: every key and value is read once. The table shows GB/s of K and V
(kernel time by graph replay), that of torch's copy_ of a large buffer (read and written), and our
rate over the best peer's and over the copy's. Each case has two rows. "in-turn" is the share of a
call in a graph of 20 or more, as a serving engine captures its layers: each reads the next of
several caches, together too large for one to be in L2 when its turn comes again. "cold" is a single
call: L2 has been cleared, of code as well, and the launch of the graph counts.
Random data; every call of every back-end is checked against a float32 reference on the first and
the last sequence, and all of them against each other.
Without options it runs a table of cases from one long sequence to many short ones. --mixed draws
lengths evenly between 1k and the given one, and adds a row of equal lengths of the same total.
"""

import math
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F

import bench
import neginf
from bench_combine import ROOF, copy_of_large_buffer

SHORTEST = 1024  # of mixed lengths
IN_TURN, COLD = "in-turn", "cold"
CALLS = 20  # in turn, at least
TURN_BYTES = 512 << 20  # of the caches that calls read in turn, at least: ten times an L2
MOST_TURNS = 64


@dataclass(frozen=True)
class Case:
    """One step: `new_tokens` queries of each sequence, the last of `seqlen` keys."""

    batch: int
    seqlen: int  # the longest
    heads: int = 32
    heads_k: int = 8
    head_dim: int = 128
    new_tokens: int = 1
    page_size: int = 0  # 0: a dense cache
    is_mixed: bool = False
    dtype: torch.dtype = torch.bfloat16

    def lengths(self):
        if not self.is_mixed:
            return [self.seqlen] * self.batch
        even = torch.linspace(SHORTEST, self.seqlen, self.batch).round().int()
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(0))
        return even[order].tolist()

    def with_equal_lengths(self):
        return replace(self, seqlen=sum(self.lengths()) // self.batch, is_mixed=False)

    def traffic(self):
        """Bytes of K and V."""
        return sum(self.lengths()) * self.heads_k * 2 * self.head_dim * self.dtype.itemsize

    def turns(self):
        """How many caches calls read in turn, so that none is in L2 when it is read again."""
        return min(max(2, math.ceil(TURN_BYTES / self.traffic())), MOST_TURNS)

    def columns(self):
        return {
            "batch": self.batch,
            "heads": f"{self.heads}/{self.heads_k}",
            "head_dim": self.head_dim,
            "new": self.new_tokens,
            "page_size": self.page_size or "dense",
            "lengths": "mixed" if self.is_mixed else "equal",
            "keys": sum(self.lengths()) // self.batch,
        }


CASES = (
    Case(16, 32768),
    Case(64, 4096),
    Case(128, 8192, heads=64),
    Case(8, 8192),
    Case(16, 8192, heads=16, heads_k=1),
    Case(32, 8192, head_dim=64),
    Case(32, 8192, new_tokens=4),
    Case(1, 131072),
    Case(1, 8192),
    Case(1, 65536),
    Case(16, 8192, heads_k=32),
    Case(16, 32768, page_size=64),
    Case(16, 32768, page_size=16),
    Case(32, 32768, is_mixed=True),
    Case(32, 32768, is_mixed=True).with_equal_lengths(),
)


class Problem:
    """The tensors of a case. Pages lie in random order, as after some time of serving."""

    def __init__(self, case, device="cuda"):
        self.case = case
        self.lengths = case.lengths()
        self.cache_seqlens = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        entries, rows, self.page_table = case.batch, max(self.lengths), None
        if case.page_size:
            columns, rows = -(-rows // case.page_size), case.page_size
            entries *= columns
            order = torch.randperm(entries, dtype=torch.int32, device=device)
            self.page_table = order.view(case.batch, columns)

        def normal(*shape):
            return torch.randn(*shape, case.head_dim, device=device, dtype=case.dtype)

        self.q = normal(case.batch, case.new_tokens, case.heads)
        self.k_cache, self.v_cache = (normal(entries, rows, case.heads_k) for _ in range(2))

    def sequence(self, cache, index):
        """(keys, heads_k, head_dim)"""
        if self.page_table is None:
            rows = cache[index]
        else:
            rows = cache[self.page_table[index]].flatten(0, 1)
        return rows[: self.lengths[index]]


def reference(problem, index):
    """The formula for one sequence in float32: (new_tokens, heads, head_dim)."""
    case = problem.case
    k, v = (problem.sequence(x, index).float() for x in (problem.k_cache, problem.v_cache))
    q = problem.q[index].float().unflatten(1, (case.heads_k, -1))
    scores = torch.einsum("qhgd,khd->hgqk", q, k) * case.head_dim**-0.5
    last = torch.arange(case.new_tokens, device=q.device)[:, None] + len(k) - case.new_tokens
    scores.masked_fill_(torch.arange(len(k), device=q.device) > last, -torch.inf)
    return torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), v).flatten(1, 2)


# ---- back-ends: problem -> function without arguments that returns out, shaped as q


def neginf_decode(problem):
    return lambda: neginf.flash_attn_with_kvcache(
        problem.q, problem.k_cache, problem.v_cache, cache_seqlens=problem.cache_seqlens,
        page_table=problem.page_table, causal=True,
    )  # fmt: skip


def fa2_decode(problem):
    from flash_attn import flash_attn_with_kvcache

    return lambda: flash_attn_with_kvcache(
        problem.q, problem.k_cache, problem.v_cache, cache_seqlens=problem.cache_seqlens,
        block_table=problem.page_table, causal=True,
    )  # fmt: skip


def fa3_decode(problem):
    from flash_attn_interface import flash_attn_with_kvcache

    return lambda: flash_attn_with_kvcache(
        problem.q, problem.k_cache, problem.v_cache, cache_seqlens=problem.cache_seqlens,
        page_table=problem.page_table, causal=True,
    )  # fmt: skip


def pages_of(problem):
    """K, V and the table: a dense cache is one of pages in order."""
    if problem.page_table is not None:
        return problem.k_cache, problem.v_cache, problem.page_table
    batch, rows = problem.k_cache.shape[:2]
    page_size = 16
    if rows % page_size:
        raise ValueError(f"caches are paged, and {rows} keys are no pages of {page_size}")
    k, v = (
        cache.view(-1, page_size, *cache.shape[2:]) for cache in (problem.k_cache, problem.v_cache)
    )
    return k, v, torch.arange(len(k), dtype=torch.int32, device=k.device).view(batch, -1)


def flashinfer_decode(problem):
    import flashinfer

    case = problem.case
    k, v, table = pages_of(problem)
    page_size = k.shape[1]
    counts = [-(-length // page_size) for length in problem.lengths]
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(k.device)
    pages = torch.cat([table[b, :count] for b, count in enumerate(counts)])
    in_last_page = (problem.cache_seqlens - 1) % page_size + 1
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=k.device)
    sizes = (case.heads, case.heads_k, case.head_dim, page_size)
    if case.new_tokens == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=case.heads > case.heads_k
        )
        wrapper.plan(starts, pages, in_last_page, *sizes, q_data_type=case.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        rows = torch.arange(case.batch + 1, dtype=torch.int32, device=k.device) * case.new_tokens
        wrapper.plan(rows, starts, pages, in_last_page, *sizes, causal=True, q_data_type=case.dtype)
    return lambda: wrapper.run(problem.q.flatten(0, 1), (k, v)).view_as(problem.q)


def torch_decode(problem):
    case = problem.case
    if case.page_size or case.is_mixed:
        raise ValueError("caches are dense, of equal lengths")
    if case.new_tokens > 1:
        raise ValueError("a causal mask is aligned to the first key")
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k_cache, problem.v_cache))
    return lambda: F.scaled_dot_product_attention(
        q, k, v, enable_gqa=case.heads != case.heads_k
    ).transpose(1, 2)


BACKENDS = {  # label: (function, module that must be installed)
    bench.OURS: (neginf_decode, None),
    "torch SDPA": (torch_decode, None),
    "flash_attn": (fa2_decode, "flash_attn_2_cuda"),
    "FA-3": (fa3_decode, "flash_attn_interface"),
    "FlashInfer": (flashinfer_decode, "flashinfer"),
}


# ---- the run


def check(problem, results):
    """Against the reference where it is cheap, and against each other everywhere."""
    checked = sorted({0, problem.case.batch - 1})
    exact = torch.stack([reference(problem, index) for index in checked])
    of_checked = {name: {"out": out[checked]} for name, out in results.items()}
    bench.check_agreement({"the formula": {"out": exact}, **of_checked})
    if results:
        bench.check_agreement({name: {"out": out} for name, out in results.items()})


def in_turn(prepare, problems, count):
    """So many calls, each of the next problem."""
    prepared = [prepare(problem) for problem in problems]
    return bench.one_by_one([prepared[i % len(prepared)] for i in range(count)])


def measure(case, calls, rounds, copy):
    problems = [Problem(case) for _ in range(case.turns() if calls == IN_TURN else 1)]
    count = max(CALLS, len(problems)) if calls == IN_TURN else 1
    backends = {n: f for n, (f, module) in BACKENDS.items() if not module or find_spec(module)}
    graphs, reasons = {}, {}
    for name, prepare in backends.items():
        captured, reason = bench.attempt(
            lambda prepare=prepare: bench.Captured(lambda: in_turn(prepare, problems, count))
        )
        if captured is None:
            reasons[name] = reason
        else:
            graphs[name] = captured
    for i in range(count):
        outs = {name: captured.result[i] for name, captured in graphs.items()}
        check(problems[i % len(problems)], outs)
    ms = bench.interleaved_ms({**graphs, ROOF: copy[0]}, rounds, is_warm=calls == IN_TURN)
    moved = count * case.traffic()
    return bench.Result(
        {**case.columns(), "calls": calls},
        {name: moved / ms[name] / 1e6 if name in ms else None for name in backends},
        copy[1] / ms[ROOF] / 1e6,
        reasons,
        1e3 * ms[bench.OURS] / count if bench.OURS in ms else None,
    )


def heads_pair(text):
    """32/8 is 32 query heads over 8 key heads; 32 is as many of both."""
    numbers = [int(number) for number in text.split("/")]
    heads, heads_k = numbers[0], numbers[-1]
    if len(numbers) > 2 or heads_k < 1 or heads < 1 or heads % heads_k:
        raise ValueError
    return heads, heads_k


def options_of(doc):
    options = bench.parser(doc)
    options.add_argument("--batch", type=int, nargs="+")
    options.add_argument("--seqlens", type=int, nargs="+", help="keys of a sequence")
    options.add_argument("--heads", type=heads_pair, nargs="+", metavar="HEADS/HEADS_K")
    options.add_argument("--head-dims", type=int, nargs="+")
    options.add_argument("--new-tokens", type=int, nargs="+", help="queries of a sequence")
    options.add_argument("--page-sizes", type=int, nargs="+", help="0: a dense cache")
    options.add_argument("--mixed", action="store_true", help="lengths from 1k to the given one")
    options.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    both = (IN_TURN, COLD)
    options.add_argument(
        "--calls", type=bench.choice_of(both), default=both, metavar="A,B", help=",".join(both)
    )
    return options


def cases_of(options):
    """The table of cases, or all combinations of what is given and what the table begins with."""
    dtype, first = bench.DTYPES[options.dtype], CASES[0]
    given = {
        "batch": options.batch,
        "seqlen": options.seqlens,
        "heads": options.heads,
        "head_dim": options.head_dims,
        "new_tokens": options.new_tokens,
        "page_size": options.page_sizes,
    }
    if not options.mixed and not any(given.values()):
        return [replace(case, dtype=dtype) for case in CASES]
    defaults = {**vars(first), "heads": (first.heads, first.heads_k)}
    cases = [replace(first, dtype=dtype, is_mixed=options.mixed)]
    for name in ("head_dim", "heads", "new_tokens", "page_size", "batch", "seqlen"):
        values = given[name] or [defaults[name]]
        changes = [
            {"heads": v[0], "heads_k": v[1]} if name == "heads" else {name: v} for v in values
        ]
        cases = [replace(case, **change) for case in cases for change in changes]
    if options.mixed:
        too_short = [case.seqlen for case in cases if case.seqlen < SHORTEST]
        if too_short:
            raise SystemExit(f"--seqlens: {too_short[0]} with --mixed, which begins at {SHORTEST}")
        cases = [one for case in cases for one in (case, case.with_equal_lengths())]
    return cases


def main():
    options = options_of(__doc__).parse_args()
    cases = cases_of(options)
    bench.need_gpu("bench_decode.py")
    torch.manual_seed(0)
    copy = copy_of_large_buffer()
    results = [
        measure(case, calls, options.rounds, copy) for case in cases for calls in options.calls
    ]
    bench.report(options, f"decode, {options.dtype}", results, ROOF, "keys", "GB/s of K and V")


if __name__ == "__main__":
    main()
