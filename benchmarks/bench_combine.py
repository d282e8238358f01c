"""Bytes per second of merging attention states on a GPU, against a device copy in the same run.

Run: python benchmarks/bench_combine.py [--splits 8 --head-dims 128 --dtypes float32:bfloat16]

Merging is bound by memory: every state is read once and the merged one written. The table shows
GB/s of what must be moved (states, their lse, the result), that of torch's copy_ of a large buffer
(read and written), and our rate over the best peer's and over the copy's. 16k rows, 16 heads,
random states, none of them empty since the payload of an empty one need not be read; results are
checked against the formula on the measured data.
--backward measures the gradient: states and dout are read, the states' gradients written.
--listed gives our side a list of states, each in memory of its own, as merge_states takes them;
results then have the dtype of the states.
"""

from importlib.util import find_spec

import torch

import bench
import neginf

ROOF = "copy"
COPY_BYTES = 1 << 30


def states(splits, rows, heads, head_dim, dtype, empty, device="cuda"):
    """Random states as flash_attn_combine takes them, with batch 1."""
    out = torch.randn(splits, 1, rows, heads, head_dim, device=device, dtype=dtype)
    lse = 3 * torch.randn(splits, 1, heads, rows, device=device)
    lse[torch.rand(lse.shape, device=device) < empty] = -torch.inf
    return out, lse


def merged(out, lse):
    """The formula, in float32."""
    weights = lse.softmax(0).nan_to_num(0.0)  # no state at all: 0 / 0
    total = torch.zeros(out.shape[1:], device=out.device)
    for state, weight in zip(out, weights, strict=True):
        total += state * weight.transpose(1, 2).unsqueeze(-1)
    return total


def traffic(splits, rows, heads, head_dim, dtype, out_dtype, backward=False):
    """Bytes that must be moved."""
    merged_rows = rows * heads
    partials = splits * merged_rows * (head_dim * dtype.itemsize + 4)
    result = merged_rows * (head_dim * out_dtype.itemsize + 4)
    return (2 if backward else 1) * partials + result


def copy_of_large_buffer():
    """A copy and the bytes that it moves. Not in a graph, where copies are slower."""
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return bench.Eager(lambda: target.copy_(source)), 2 * COPY_BYTES


# ---- back-ends: (states, dtype of out) -> function without arguments


def neginf_combine(out, lse, out_dtype):
    return lambda: neginf.flash_attn_combine(out, lse, out_dtype=out_dtype)[0]


def neginf_merge(out, lse, out_dtype):
    need_dtype_of_states(out, out_dtype)
    outs, lses = listed(out), listed(lse)
    return lambda: neginf.merge_states(outs, lses)[0]


def listed(states):
    return [state.clone() for state in states]


def need_dtype_of_states(out, out_dtype):
    if out_dtype != out.dtype:
        raise ValueError("the result has the dtype of the states")


def fa3_combine(out, lse, out_dtype):
    from flash_attn_interface import flash_attn_combine

    heads_last = lse.transpose(-1, -2)
    return lambda: flash_attn_combine(out, heads_last, out_dtype=out_dtype)[0]


def flashinfer_combine(out, lse, out_dtype):
    from flashinfer import merge_states

    need_dtype_of_states(out, out_dtype)
    states = out[:, 0].transpose(0, 1).contiguous()  # (rows, splits, heads, head_dim)
    log2 = (lse[:, 0] * 1.4426950408889634).permute(2, 0, 1).contiguous()
    return lambda: merge_states(states, log2)[0].unsqueeze(0)


BACKENDS = {  # label: (function, module that must be installed)
    bench.OURS: (neginf_combine, None),
    "FA-3": (fa3_combine, "flash_attn_interface"),
    "FlashInfer": (flashinfer_combine, "flashinfer"),
}


def installed_backends():
    return {n: f for n, (f, module) in BACKENDS.items() if not module or find_spec(module)}


def prepare_backward(out, lse, out_dtype):
    leaves = out.detach().requires_grad_(), lse.detach().requires_grad_()
    result = neginf.flash_attn_combine(*leaves, out_dtype=out_dtype)[0]
    dout = torch.randn_like(result)
    return lambda: torch.autograd.grad(result, leaves, dout, retain_graph=True)


def prepare_backward_of_list(out, lse, out_dtype):
    need_dtype_of_states(out, out_dtype)
    leaves = [state.requires_grad_() for state in listed(out.detach()) + listed(lse.detach())]
    result = neginf.merge_states(leaves[: len(out)], leaves[len(out) :])[0]
    dout = torch.randn_like(result)
    return lambda: torch.autograd.grad(result, leaves, dout, retain_graph=True)


def backends_of(backward, is_listed):
    if backward:
        return {bench.OURS: prepare_backward_of_list if is_listed else prepare_backward}
    backends = installed_backends()
    return {**backends, bench.OURS: neginf_merge} if is_listed else backends


def measure(case, options, copy):
    splits, head_dim, dtype, out_dtype = case
    rows, heads = options.rows, options.heads
    out, lse = states(splits, rows, heads, head_dim, dtype, empty=0.0)
    backends = backends_of(options.backward, options.listed)
    graphs, reasons, results = {}, {}, {}
    for name, prepare in backends.items():
        captured, reason = bench.attempt(
            lambda prepare=prepare: bench.Captured(lambda: prepare(out, lse, out_dtype))
        )
        if captured is None:
            reasons[name] = reason
        else:
            graphs[name], results[name] = captured, captured.result
    if not options.backward:
        formula = {"the formula": merged(out, lse), **results}
        bench.check_agreement({n: {"out": x} for n, x in formula.items()}, tolerance=1e-2)
    ms = bench.interleaved_ms({**graphs, ROOF: copy[0]}, options.rounds)
    moved = traffic(splits, rows, heads, head_dim, dtype, out_dtype, options.backward)
    columns = {
        "partials": bench.dtype_name(dtype),
        "out": bench.dtype_name(out_dtype),
        "head_dim": head_dim,
        "splits": splits,
    }
    rates = {name: moved / ms[name] / 1e6 if name in ms else None for name in backends}
    return bench.Result(columns, rates, copy[1] / ms[ROOF] / 1e6, reasons)


def dtype_pair(text):
    """float32:bfloat16 is float32 states merged into a bfloat16 out; float32 is both."""
    names = text.split(":")
    pair = [bench.DTYPES[name] for name in names]
    return pair[0], pair[-1]


def options_of(doc):
    options = bench.parser(doc)
    options.add_argument("--splits", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    options.add_argument("--rows", type=int, default=16384)
    options.add_argument("--heads", type=int, default=16)
    options.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    options.add_argument(
        "--dtypes",
        type=dtype_pair,
        nargs="+",
        metavar="PARTIALS[:OUT]",
        default=[dtype_pair(d) for d in ("float32", "float32:bfloat16", "bfloat16")],
    )
    options.add_argument("--backward", action="store_true")
    options.add_argument("--listed", action="store_true", help="merge lists of states")
    return options


def main():
    options = options_of(__doc__).parse_args()
    bench.need_gpu("bench_combine.py")
    torch.manual_seed(0)
    copy = copy_of_large_buffer()
    results = []
    for dtype, out_dtype in options.dtypes:
        for head_dim in options.head_dims:
            for splits in options.splits:
                case = splits, head_dim, dtype, out_dtype
                results.append(measure(case, options, copy))
    what = ["combine", *(["of lists"] if options.listed else [])]
    title = f"{' '.join(what)}{', backward' if options.backward else ''}, {options.rows} rows"
    bench.report(options, f"{title} of {options.heads} heads", results, ROOF, "splits", "GB/s")


if __name__ == "__main__":
    main()
