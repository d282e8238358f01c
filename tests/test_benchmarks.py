"""The benchmarks without a GPU: what they count, what they print, and that they say what they need.

What a GPU must be there for, the timing itself, is not tested.
"""

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

bench = pytest.importorskip("bench", reason="rich is not installed")
from rich.console import Console  # noqa: E402

import attention  # noqa: E402
import bench_combine  # noqa: E402
import bench_decode  # noqa: E402
import bench_ring  # noqa: E402

NAN = float("nan")


def case(**changes):
    fields = {
        "head_dim": 64, "head_dim_v": 64, "causal": False, "seqlen": 1024, "batch": 16,
        "heads": 32, "heads_k": 32,
    }  # fmt: skip
    return attention.Case(**{**fields, **changes})


def test_operations():
    """Two products in the forward, five in the backward, two operations per multiply-add."""
    product = 2 * 16 * 32 * 1024 * 1024 * 64
    assert case().operations() == 2 * product
    assert case().operations(backward=True) == 5 * product
    assert case(causal=True).operations() == product
    assert case(heads_k=4).operations() == 2 * product
    narrower = case(head_dim_v=32)  # one product of the forward, two of the backward
    assert narrower.operations() == 1.5 * product
    assert narrower.operations(backward=True) == 4 * product


def test_cases_keep_tokens_and_hidden():
    options = attention.options_of("doc", backward=True).parse_args(
        ["--head-dims", "64", "256", "--seqlens", "512", "32768", "--masks", "causal"]
    )
    cases = list(attention.cases_of(options))
    assert [(c.head_dim, c.seqlen, c.batch, c.heads, c.heads_k) for c in cases] == [
        (64, 512, 32, 32, 32), (64, 32768, 1, 32, 32), (256, 512, 32, 8, 8), (256, 32768, 1, 8, 8),
    ]  # fmt: skip
    assert all(c.causal for c in cases)


def test_default_run_covers_both_masks():
    options = attention.options_of("doc", backward=False).parse_args([])
    cases = list(attention.cases_of(options))
    assert {(c.head_dim, c.causal) for c in cases} == {
        (64, False), (64, True), (128, False), (128, True),
    }  # fmt: skip
    assert {c.seqlen for c in cases} >= {1024, 16384}


def test_heads_k_must_divide():
    options = attention.options_of("doc", backward=False).parse_args(["--heads-k", "3"])
    with pytest.raises(SystemExit, match="heads-k: 3"):
        list(attention.cases_of(options))


def test_choice_of():
    parse = bench.choice_of(("a", "b"))
    assert parse("b,a") == ["b", "a"]
    with pytest.raises(argparse.ArgumentTypeError, match="'c' is none of a, b"):
        parse("a,c")


def test_backends_that_are_not_installed(monkeypatch):
    absent = attention.Backend("Absent", None, "no_such_package.no_such_module")
    forward_only = attention.Backend("Forward only", None, has_backward=False)
    monkeypatch.setattr(
        attention,
        "BACKENDS",
        {"neginf": attention.BACKENDS["neginf"], "absent": absent, "forward": forward_only},
    )
    assert [b.label for b in attention.chosen_backends(None, True)] == ["neginf"]
    assert [b.label for b in attention.chosen_backends(None, False)] == ["neginf", "Forward only"]
    with pytest.raises(SystemExit, match=r"absent needs no_such_package\.no_such_module"):
        attention.chosen_backends(["absent"], False)
    with pytest.raises(SystemExit, match="forward has no backward"):
        attention.chosen_backends(["forward"], True)


def results():
    return [
        bench.Result(
            {"head_dim": 64, "mask": mask, "seqlen": seqlen},
            {"neginf": 450.0, "torch FA-2": 300.0, "torch cuDNN": cudnn},
            750.0,
            {} if cudnn else {"torch cuDNN": "RuntimeError: no such kernel"},
        )
        for mask in ("full", "causal")
        for seqlen, cudnn in ((1024, 500.0), (2048, None))
    ]


def test_ratios():
    with_peer, without = results()[:2]
    assert bench.ratios(with_peer, "torch FA-2", "matmul") == {
        "/ best peer": 0.9, "/ torch FA-2": 1.5, "/ matmul": 0.6,
    }  # fmt: skip
    assert bench.ratios(without, "torch FA-2", "matmul")["/ best peer"] == 1.5
    assert set(bench.ratios(with_peer, None, "copy")) == {"/ best peer", "/ copy"}
    alone = bench.Result({}, {"neginf": None, "torch FA-2": 300.0}, 750.0)
    assert set(bench.ratios(alone, "torch FA-2", "matmul").values()) == {None}
    assert bench.best_peer({"neginf": 1.0}) is None


def test_table_has_a_dash_and_a_note_for_what_cannot_be_done():
    text = io.StringIO()
    table = bench.table("speeds", results(), "matmul", "torch FA-2")
    Console(file=text, width=200).print(table)
    rows = [line.split("│") for line in text.getvalue().splitlines() if " 2048 " in line]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0] == ["64", "full", "2048", "450", "300", "-", "750", "1.50", "1.50", "0.60"]
    assert bench.notes(results()) == [
        "- torch cuDNN: RuntimeError: no such kernel [64 full 2048, 64 causal 2048]"
    ]
    assert bench.notes(results() * 2)[0].endswith(", 64 full 2048 and 1 more]")


def test_records_are_json():
    first, second = json.loads(json.dumps(bench.records(results(), None, "matmul")))[:2]
    assert first["torch cuDNN"] == 500.0
    assert first["ratios"]["/ matmul"] == 0.6
    assert "reasons" not in first
    assert second["torch cuDNN"] is None
    assert second["reasons"] == {"torch cuDNN": "RuntimeError: no such kernel"}


def test_times_are_shown_where_there_are_some():
    text = io.StringIO()
    timed = [*results(), bench.Result({"head_dim": 64}, {}, 750.0, us=15.84)]
    Console(file=text, width=200).print(bench.table("speeds", timed, "matmul"))
    lines = text.getvalue().splitlines()
    assert "neginf, us" in lines[2]
    assert " 15.8 " in lines[-2]
    assert "us" not in bench.records(timed, None, "matmul")[0]
    assert bench.records(timed, None, "matmul")[-1]["us"] == 15.84


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "speeds.png"
    bench.plot(path, "speeds", results(), "matmul", "seqlen", "TFLOP/s")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_attempt():
    import warnings

    def rejected():
        warnings.warn("Flash attention has been runtime disabled.", stacklevel=1)
        warnings.warn("head_dim 512 is too large (Triggered internally at a.cpp:1.)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting.\nmore")

    assert bench.attempt(lambda: 7) == (7, None)
    assert bench.attempt(rejected) == (
        None, "RuntimeError: No available kernel / head_dim 512 is too large",
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        bench.attempt(lambda: 1 / 0)
    with pytest.warns(UserWarning, match="still seen"):
        bench.attempt(lambda: warnings.warn("still seen", stacklevel=1))


def test_agreement():
    good = torch.randn(4, 100, 2, 64)
    near = good + 0.004 * torch.randn_like(good)
    bench.check_agreement({"a": {"out": good}, "b": {"out": near}})
    one_wrong_row = good.clone()
    one_wrong_row[3, 99, 1] *= 0.9
    one_nan = good.clone()
    one_nan[0, 0, 0, 0] = NAN
    for bad in (one_wrong_row, one_nan):
        with pytest.raises(SystemExit, match="b and a disagree in out"):
            bench.check_agreement({"a": {"out": good}, "b": {"out": bad}})
    # Rows of zeros, as dq of a row that sees one key.
    zeros = good.clone()
    zeros[:, 0] = 0
    noise = zeros.clone()
    noise[:, 0] = 1e-3
    bench.check_agreement({"a": {"out": zeros}, "b": {"out": noise}})


@pytest.mark.parametrize("heads_k", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_back_ends_agree(causal, heads_k):
    """What is captured on a GPU, run on the CPU, where torch has a flash kernel too."""
    problem = case(seqlen=48, batch=2, heads=4, heads_k=heads_k, causal=causal)
    tensors = problem.tensors("cpu")
    for prepare, outputs in ((attention.prepare_forward, 1), (attention.prepare_backward, 3)):
        results = {}
        for name in ("neginf", "fa2-sdpa"):
            call = prepare(attention.BACKENDS[name], problem, tensors)
            call()
            results[name] = dict(enumerate(call()))
        assert len(results["neginf"]) == outputs
        bench.check_agreement(results)


def test_combine_formula_is_ours():
    out, lse = bench_combine.states(5, 33, 3, 16, torch.float32, empty=0.4, device="cpu")
    lse[..., 0] = -torch.inf
    out_of_ours = bench_combine.neginf_combine(out, lse, torch.float32)()
    torch.testing.assert_close(bench_combine.merged(out, lse), out_of_ours)
    douts, dlses = bench_combine.prepare_backward(out, lse, torch.float32)()
    assert (douts.shape, dlses.shape) == (out.shape, lse.shape)
    of_list = bench_combine.neginf_merge(out, lse, torch.float32)()
    torch.testing.assert_close(of_list, out_of_ours)
    gradients = bench_combine.prepare_backward_of_list(out, lse, torch.float32)()
    assert [g.shape for g in gradients] == [out[0].shape] * 5 + [lse[0].shape] * 5
    with pytest.raises(ValueError, match="the dtype of the states"):
        bench_combine.neginf_merge(out, lse, torch.bfloat16)


def test_combine_traffic():
    f32, b16 = torch.float32, torch.bfloat16
    assert bench_combine.traffic(8, 10, 2, 128, f32, f32) == 20 * (8 * 516 + 516)
    assert bench_combine.traffic(8, 10, 2, 128, f32, b16) == 20 * (8 * 516 + 260)
    assert bench_combine.traffic(8, 10, 2, 128, f32, f32, backward=True) == 20 * (16 * 516 + 516)
    assert bench_combine.dtype_pair("float32:bfloat16") == (f32, b16)
    assert bench_combine.dtype_pair("float16") == (torch.float16, torch.float16)


def decode_cases(*arguments):
    return bench_decode.cases_of(bench_decode.options_of("doc").parse_args(arguments))


def test_decode_traffic():
    """Every key and value once, however many heads and tokens look at it."""
    one = bench_decode.Case(16, 32768)
    assert one.traffic() == 2 * 16 * 32768 * 8 * 128 * 2
    assert bench_decode.Case(16, 32768, heads=64, new_tokens=4, page_size=16).traffic() == (
        one.traffic()
    )
    assert bench_decode.Case(16, 32768, heads_k=1, head_dim=64).traffic() == one.traffic() / 16


def test_decode_cases():
    assert decode_cases() == list(bench_decode.CASES)
    assert {case.dtype for case in decode_cases("--dtype", "float16")} == {torch.float16}
    cases = decode_cases("--heads", "64/8", "16", "--page-sizes", "0", "64", "--seqlens", "4096")
    assert [(c.heads, c.heads_k, c.page_size) for c in cases] == [
        (64, 8, 0), (64, 8, 64), (16, 16, 0), (16, 16, 64),
    ]  # fmt: skip
    assert {(c.batch, c.seqlen, c.head_dim, c.new_tokens) for c in cases} == {(16, 4096, 128, 1)}
    assert bench_decode.heads_pair("32/8") == (32, 8)
    for text in ("32/5", "8/32", "1/2/3", "0"):
        with pytest.raises(ValueError):  # noqa: PT011, argparse says what it was
            bench_decode.heads_pair(text)


def test_decode_mixed_lengths_have_a_row_of_equal_ones():
    mixed, equal = decode_cases("--mixed", "--batch", "32", "--seqlens", "32768")
    assert (mixed, equal) == bench_decode.CASES[-2:]
    lengths = mixed.lengths()
    assert lengths != sorted(lengths)
    assert (min(lengths), max(lengths)) == (1024, 32768)
    assert equal.lengths() == [16896] * 32
    assert sum(lengths) == pytest.approx(sum(equal.lengths()), abs=32)
    assert mixed.columns()["keys"] == equal.columns()["keys"]
    with pytest.raises(SystemExit, match="--seqlens: 512 with --mixed"):
        decode_cases("--mixed", "--seqlens", "512")


@pytest.mark.parametrize(
    "changes",
    [{}, {"page_size": 16}, {"page_size": 7, "new_tokens": 3}, {"heads_k": 1, "is_mixed": True}],
)
def test_decode_is_that_of_the_formula(changes):
    """What is captured on a GPU, run on the CPU."""
    small = bench_decode.Case(3, 1100, heads=4, heads_k=2, head_dim=16)
    problem = bench_decode.Problem(bench_decode.replace(small, **changes), "cpu")
    results = {bench.OURS: bench_decode.neginf_decode(problem)()}
    if not changes:
        results["torch SDPA"] = bench_decode.torch_decode(problem)()
    else:
        with pytest.raises(ValueError, match=r"dense|aligned"):
            bench_decode.torch_decode(problem)
    bench_decode.check(problem, results)
    results[bench.OURS][-1, 0, 0] *= 0.9
    with pytest.raises(SystemExit, match="neginf and the formula disagree"):
        bench_decode.check(problem, results)


def test_decode_calls_read_caches_in_turn():
    """Enough of them that none is in L2 again."""
    assert bench_decode.Case(16, 32768).turns() == 2
    one_sequence = bench_decode.Case(1, 8192)
    assert one_sequence.turns() * one_sequence.traffic() == bench_decode.TURN_BYTES
    assert bench_decode.Case(1, 64).turns() == bench_decode.MOST_TURNS
    assert bench_decode.options_of("doc").parse_args([]).calls == ("in-turn", "cold")

    small = bench_decode.Case(3, 40, heads=4, heads_k=2, head_dim=16)
    problems = [bench_decode.Problem(small, "cpu") for _ in range(2)]
    outs = bench_decode.in_turn(bench_decode.neginf_decode, problems, 3)()
    assert len(outs) == 3
    for problem, out in zip([*problems, problems[0]], outs, strict=True):
        bench_decode.check(problem, {bench.OURS: out})


def test_decode_pages_of_a_dense_cache():
    problem = bench_decode.Problem(bench_decode.Case(2, 48, heads_k=1, head_dim=8), "cpu")
    k, _, table = bench_decode.pages_of(problem)
    assert torch.equal(k[table[1]].flatten(0, 1), problem.k_cache[1])
    problem = bench_decode.Problem(bench_decode.Case(2, 50, heads_k=1, head_dim=8), "cpu")
    with pytest.raises(ValueError, match="50 keys are no pages of 16"):
        bench_decode.pages_of(problem)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "script",
    [
        "bench_fwd.py",
        "bench_bwd.py",
        "bench_combine.py",
        "bench_decode.py",
        "bench_host.py",
        "bench_ring.py",
    ],
)
def test_without_a_gpu_one_line_says_so(script):
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / script)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith(script)
    assert "torch sees no" in run.stderr


def test_a_nan_is_the_largest_error_of_a_ring(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        *leaves, dout = (torch.randn(1, 3, 1, 4, requires_grad=i < 3) for i in range(4))
        calls = {
            bench_ring.ONE: (leaves, dout, lambda q, k, v: q * k * v),
            "ring": (leaves, dout, lambda q, k, v: q * k * v * torch.nan),
        }
        errors = bench_ring.errors_of(bench_ring.SequenceSharding(3), calls)
    finally:
        dist.destroy_process_group()
    assert errors == {"ring": dict.fromkeys(("out", "dq", "dk", "dv"), torch.inf)}
