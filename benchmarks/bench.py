"""What the benchmarks share: kernel times on a GPU, ratios, tables, JSON and plots.

A call is captured in a CUDA graph and its replays are timed with events, so that Python does not
count. Back-ends take turns within each round, so that all of them meet the same clocks; what is
reported is the median. Before each replay a buffer larger than the L2 cache is cleared: every
sample starts cold, and the host is ahead of the GPU when the clock starts. What is to be timed warm
runs once instead; a graph of several calls must bring its own data then, more than L2 holds.
"""

import argparse
import json
import statistics
import warnings
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table

OURS = "neginf"
L2_FLUSH_BYTES = 256 << 20
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def parser(doc, rounds=11):
    """Options that every benchmark of kernel times has."""
    options = argparse.ArgumentParser(description=doc.splitlines()[0])
    options.add_argument("--json", metavar="FILE", help="write the results here")
    options.add_argument("--plot", metavar="FILE.png", help="draw the results here")
    options.add_argument("--rounds", type=int, default=rounds, help="samples per number")
    return options


def choice_of(names):
    """An argparse type: some of `names`, separated by commas."""

    def parse(text):
        chosen = text.split(",")
        for name in chosen:
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}")
        return chosen

    return parse


def need_gpu(script):
    if not torch.cuda.is_available():
        raise SystemExit(f"{script} measures on a GPU, and torch sees none")


# ---- timing


class Captured:
    """A graph of the call that prepare() returns, and the call's result.

    prepare() runs on the stream that is captured, where autograd will also run a backward whose
    forward was run by prepare(). The call is kept: what it holds is what the graph reads.
    """

    def __init__(self, prepare):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.call = prepare()
            self.call()  # whatever is compiled, chosen or allocated once
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.result = self.call()
        torch.cuda.current_stream().wait_stream(stream)
        self.run()

    def run(self):
        self.graph.replay()


def one_by_one(calls):
    """A call that makes all of them and returns their results."""
    return lambda: [call() for call in calls]


class Eager:
    """A call of so little host time that it needs no graph."""

    def __init__(self, call):
        self.run = call


def sample_ms(measured, run_before):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run_before()
    start.record()
    measured.run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def interleaved_ms(measured, rounds, is_warm=False):
    """The median time of each, {name: Captured or Eager}, in ms."""
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    samples = {name: [] for name in measured}
    for _ in range(rounds):
        for name, one in measured.items():
            samples[name].append(sample_ms(one, one.run if is_warm else flush.zero_))
    return {name: statistics.median(times) for name, times in samples.items()}


def matmul_8192():
    """A bf16 matrix product as the roof of what the card does today, and its operations."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return Captured(lambda: lambda: a @ b), 2 * size**3


# ---- what can be measured, and whether it is right


def attempt(call):
    """(call(), None), or (None, why not). An error that broke the device is raised again."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result, reason = call(), None
        except (RuntimeError, ValueError, TypeError, AssertionError, ImportError) as error:
            result, reason = None, reason_of(error, [str(w.message) for w in caught])
    if reason is None:
        for warning in caught:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    elif torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, reason


def reason_of(error, warned=()):
    """One line: what the error says first, and what torch only warns of, why SDPA rejects a call
    (but not that it was told to use no other back-end)."""
    message = str(error).splitlines()[0] if str(error) else "no message"
    lines = [f"{type(error).__name__}: {message.split('. ')[0].rstrip('.')}"]
    for text in warned:
        text = text.split(" (Triggered internally")[0].strip()
        told_so = text.endswith(("not used because:", "has been runtime disabled."))
        if not told_so and text not in lines:
            lines.append(text)
    return " / ".join(lines)


def worst_row_error(got, reference):
    """The largest error of a row (the last dimension), over its norm plus that of a mean row."""
    got, reference = got.float(), reference.float()
    size = reference.norm(dim=-1)
    error = (got - reference).norm(dim=-1) / (size + size.mean()).clamp_min(1e-30)
    return error.max().item()  # NaN stays NaN


def check_agreement(results, tolerance=3e-2):
    """Every back-end's tensors against those of the first: {name: {what: tensor}}."""
    first, reference = next(iter(results.items()))
    for name, tensors in results.items():
        for what, tensor in tensors.items():
            error = worst_row_error(tensor, reference[what])
            if not error <= tolerance:
                raise SystemExit(f"{name} and {first} disagree in {what} by {error:.3g} of a row")


# ---- results


@dataclass
class Result:
    """One row of a table. Rates are None where a back-end cannot do the case."""

    case: dict  # column: value
    rates: dict  # back-end: rate
    roof: float  # rate of the roof in the same rounds
    reasons: dict = field(default_factory=dict)  # back-end: why it has no rate
    us: float | None = None  # of our call, where a time is what one asks for


def ratio(ours, theirs):
    return None if ours is None or theirs is None else ours / theirs


def best_peer(rates):
    return max((r for n, r in rates.items() if n != OURS and r is not None), default=None)


def ratios(result, peer, roof):
    """Ours over the best peer, over one peer in particular and over the roof."""
    ours = result.rates.get(OURS)
    named = {} if peer is None else {f"/ {peer}": ratio(ours, result.rates.get(peer))}
    return {
        "/ best peer": ratio(ours, best_peer(result.rates)),
        **named,
        f"/ {roof}": ratio(ours, result.roof),
    }


def number(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


def table(title, results, roof, peer=None):
    """A row per result: the case, the rate of each back-end and of the roof, and our ratios."""
    drawn = Table(title=title)
    first = results[0]
    has_times = any(result.us is not None for result in results)
    times = [f"{OURS}, us"] if has_times else []
    for column in (*first.case, *times, *first.rates, roof, *ratios(first, peer, roof)):
        drawn.add_column(column, justify="right")
    for result in results:
        drawn.add_row(
            *(str(value) for value in result.case.values()),
            *([number(result.us, 1)] if has_times else []),
            *(number(rate, 0) for rate in (*result.rates.values(), result.roof)),
            *(number(r, 2) for r in ratios(result, peer, roof).values()),
        )
    return drawn


def notes(results):
    """Why there are dashes: a line for each back-end and reason, with the cases it holds for."""
    cases = {}
    for result in results:
        for name, reason in result.reasons.items():
            case = " ".join(str(value) for value in result.case.values())
            cases.setdefault((name, reason), []).append(case)
    return [
        f"- {name}: {reason} [{', '.join(where[:3])}"
        + (f" and {len(where) - 3} more]" if len(where) > 3 else "]")
        for (name, reason), where in cases.items()
    ]


def records(results, peer, roof):
    """The results as plain data."""
    return [
        {
            **r.case,
            **r.rates,
            roof: r.roof,
            **({} if r.us is None else {"us": r.us}),
            "ratios": ratios(r, peer, roof),
            **({"reasons": r.reasons} if r.reasons else {}),
        }
        for r in results
    ]


def plot(path, title, results, roof, x, unit):
    """A panel for each kind of case, rate over `x`, a line per back-end and one for the roof."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {}
    for result in results:
        label = ", ".join(f"{k} {v}" for k, v in result.case.items() if k != x)
        panels.setdefault(label, []).append(result)
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5.5 * columns, 3.6 * rows), squeeze=False, sharey=True
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (label, rows_of_panel) in zip(axes.flat, panels.items(), strict=False):
        positions = [r.case[x] for r in rows_of_panel]
        for name in rows_of_panel[0].rates:
            rates = [r.rates[name] for r in rows_of_panel]
            rates = [float("nan") if rate is None else rate for rate in rates]
            axis.plot(positions, rates, marker="o", linewidth=2.5 if name == OURS else 1.2,
                      label=name, zorder=3 if name == OURS else 2)  # fmt: skip
        axis.plot(positions, [r.roof for r in rows_of_panel], "k--", linewidth=1, label=roof)
        axis.set_xscale("log", base=2)
        axis.set_xticks(positions, [str(p) for p in positions])
        axis.set(title=label, xlabel=x, ylabel=unit, ylim=(0, None))
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def report(options, title, results, roof, x, unit, peer=None):
    """The table, what the dashes mean, and the files asked for."""
    if not results:
        raise SystemExit("nothing to measure: no case is left")
    title = f"{title}, {unit}, {torch.cuda.get_device_name()}"
    drawn = table(title, results, roof, peer)
    console = Console()
    wide = console.options.update(width=1000)
    console.width = max(console.width, console.measure(drawn, options=wide).maximum)  # cut nothing
    console.print(drawn)
    for line in notes(results):
        console.print(line, markup=False, highlight=False)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(records(results, peer, roof), file, indent=2)
    if options.plot:
        plot(options.plot, title, results, roof, x, unit)
