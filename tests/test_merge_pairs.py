"""merge_state, merge_state_in_place and apply_sink: the monoid two at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

import judge
import neginf
from problems import (
    Guarded,
    Inputs,
    Problem,
    check_gradient,
    check_state,
    poisoned_allocations,
)
from targets import runs_on
from test_merge import check, states

NEG_INF = float("-inf")
NAN = float("nan")
INF = float("inf")
LEADS = [(2, 9), (7,), (1, 1), (0,)]


def pair(target, lead, seed=0, empty=0.4):
    out, lse = states(target, 2, lead, heads=2, head_dim=16, empty=empty, seed=seed)
    return (out[0], lse[0]), (out[1], lse[1])


@runs_on("combine")
@given(lead=st.sampled_from(LEADS), seed=st.integers(0, 1000))
def test_merge_state(target, lead, seed):
    a, b = pair(target, lead, seed)
    with poisoned_allocations():
        got = neginf.merge_state(*a, *b)
    check(got, torch.stack([a[0], b[0]]), torch.stack([a[1], b[1]]))


@runs_on("combine")
@given(
    lead=st.sampled_from(LEADS),
    seed=st.integers(0, 1000),
    share=st.sampled_from([None, 0.0, 0.5, 1.0]),
)
def test_in_place(target, lead, seed, share):
    """Rows of the mask are merged, the others keep every bit, NaN payloads included."""
    (out, lse), other = pair(target, lead, seed)
    generator = torch.Generator().manual_seed(seed)
    mask = None if share is None else torch.rand(lead, generator=generator) < share
    rows = torch.ones(lead, dtype=torch.bool) if mask is None else mask
    merged = neginf.merge_state(out, lse, *other)
    guarded_out = Guarded(out.cpu(), target.device)
    guarded_lse = Guarded(lse.cpu(), target.device)
    neginf.merge_state_in_place(
        guarded_out.view, guarded_lse.view, *other,
        None if mask is None else mask.to(target.device),
    )  # fmt: skip
    guarded_out.assert_guard_unchanged("out")
    guarded_lse.assert_guard_unchanged("lse")
    rows = rows.to(target.device)
    expected_out = torch.where(rows[..., None, None], merged[0], out)
    expected_lse = torch.where(rows.unsqueeze(-2), merged[1], lse)
    judge.assert_bits_equal(guarded_out.view, expected_out, "out")
    judge.assert_bits_equal(guarded_lse.view, expected_lse, "lse")


@runs_on("combine")
def test_rows_outside_the_mask_are_not_even_looked_at(target):
    (out, lse), (out_other, lse_other) = pair(target, (5,), empty=0.0)
    before = out.clone(), lse.clone()
    lse_other[:, 3] = INF
    mask = torch.tensor([True, False, True, False, True], device=target.device)
    neginf.merge_state_in_place(out, lse, out_other, lse_other, mask)
    assert lse.isfinite().all()
    for row in (1, 3):
        judge.assert_bits_equal(out[row], before[0][row], "out")
        judge.assert_bits_equal(lse[:, row], before[1][:, row], "lse")


def test_in_place_refuses_to_record_gradients():
    target_out, target_lse = torch.zeros(5, 2, 4), torch.zeros(2, 5)
    for i, name in enumerate(("out", "lse", "out_other", "lse_other")):
        tensors = [target_out.clone(), target_lse.clone(), target_out.clone(), target_lse.clone()]
        tensors[i].requires_grad_()
        with pytest.raises(ValueError, match=rf"^{name}: got .* gradient"):
            neginf.merge_state_in_place(*tensors)
        with torch.no_grad():
            neginf.merge_state_in_place(*tensors)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("name", "bad", "error"),
    [
        ("out", None, TypeError),
        ("lse", torch.zeros(5, 2), ValueError),
        ("lse", torch.zeros(2, 5).double(), TypeError),
        ("out_other", torch.zeros(5, 2, 1), ValueError),
        ("lse_other", None, TypeError),
        ("lse_other", torch.zeros(2, 1), ValueError),
        ("lse_other", torch.zeros(2, 5).int(), TypeError),
    ],
    ids=str,
)
def test_in_place_checks_with_a_mask_as_without(masked, name, bad, error):
    """Nothing is broadcast or promoted on the way through the mask."""
    out, lse = torch.zeros(5, 2, 4), torch.zeros(2, 5)
    mask = torch.ones(5, dtype=torch.bool) if masked else None
    tensors = {"out": out, "lse": lse, "out_other": out.clone(), "lse_other": lse.clone()}
    with pytest.raises(error, match=rf"^{name}: got .*accepted"):
        neginf.merge_state_in_place(**{**tensors, name: bad}, mask=mask)


MASKS = [
    (torch.ones(5), TypeError),
    ([True] * 5, TypeError),
    (torch.ones(4, dtype=torch.bool), ValueError),
    (torch.ones(5, 2, dtype=torch.bool), ValueError),
    (torch.ones(5, dtype=torch.bool, device="meta"), ValueError),
]


@pytest.mark.parametrize(("mask", "error"), MASKS, ids=str)
def test_bad_masks(mask, error):
    out, lse = torch.zeros(5, 2, 4), torch.zeros(2, 5)
    with pytest.raises(error, match=r"^mask: got .*accepted"):
        neginf.merge_state_in_place(out, lse, out.clone(), lse.clone(), mask)


SINKS = [(0.5, -1.0), (NEG_INF, 2.0), (NEG_INF, NEG_INF), (100.0, -100.0)]


@runs_on("forward", "combine")
@pytest.mark.parametrize("sinks", SINKS, ids=str)
@pytest.mark.parametrize("varlen", [False, True])
def test_sink_applied_after_is_the_sink_applied_within(target, sinks, varlen):
    lengths = {"lengths_q": (6, 2), "lengths_k": (4, 0)} if varlen else {
        "lengths_q": (6,) * 2, "lengths_k": (4,) * 2,
    }  # fmt: skip
    with_sink = Inputs(
        Problem(**lengths, varlen=varlen, causal=True, sink=sinks), target.dtype, target.device
    )
    without = Inputs(with_sink.problem.with_(sink=None), target.dtype, target.device)
    sink = torch.tensor(sinks, device=target.device)
    with poisoned_allocations():
        state = neginf.apply_sink(*without.forward(), sink)
    check_state(with_sink, *state)


@runs_on("forward", "backward", "combine", "combine_backward", dtypes=("float64", "float32"))
def test_gradients_of_the_sink(target):
    problem = Problem(lengths_q=(6,), lengths_k=(4,), causal=True, sink=(0.5, NEG_INF))
    # A row that sees the sink alone is no empty row to a merge, so its dout counts.
    inputs = Inputs(problem, target.dtype, target.device, poison=False)
    leaves = {n: inputs.tensor(n).detach().requires_grad_() for n in "qkv"}
    leaves["sink"] = inputs.options["sink"].to(target.device).requires_grad_()
    with poisoned_allocations():
        state = inputs.call(leaves["q"], leaves["k"], leaves["v"], sink=None)
        results = neginf.apply_sink(*state, leaves["sink"])
        got = torch.autograd.grad(
            results, list(leaves.values()), (inputs.tensor("dout"), inputs.dlse.to(target.device))
        )
    exact = inputs.reference_gradients(torch.float64)
    low = inputs.reference_gradients(target.dtype)
    for name, gradient in zip(leaves, got, strict=True):
        check_gradient(inputs, name, gradient, exact[name], low[name])
    assert got[3][1] == 0, "the gradient of a sink of -inf"


def test_gradcheck_of_the_sink():
    out = torch.randn(2, 3, 2, 4, dtype=torch.float64)
    lse = torch.randn(2, 2, 3, dtype=torch.float64)
    empty = torch.zeros(lse.shape, dtype=torch.bool)
    empty[0, :, 1] = True

    def function(out, lse, sink):
        return neginf.apply_sink(out, torch.where(empty, NEG_INF, lse), sink)

    sink = torch.randn(2, dtype=torch.float64)
    assert gradcheck(function, [t.requires_grad_() for t in (out, lse, sink)])


@pytest.mark.parametrize(
    ("sink", "error"),
    [
        (torch.zeros(3), ValueError),
        (torch.zeros(2, 1), ValueError),
        (torch.zeros(2, device="meta"), ValueError),
        (torch.zeros(2, dtype=torch.int32), TypeError),
        (0.5, TypeError),
    ],
    ids=str,
)
def test_bad_sinks(sink, error):
    with pytest.raises(error, match=r"^sink: got .*accepted"):
        neginf.apply_sink(torch.zeros(5, 2, 4), torch.zeros(2, 5), sink)
    for lse in (torch.zeros(1, 5), torch.zeros(5, 2)):
        with pytest.raises(ValueError, match=r"^lse: got .*accepted"):
            neginf.apply_sink(torch.zeros(5, 2, 4), lse, torch.zeros(2))
    with pytest.raises(ValueError, match=r"\+inf"):
        neginf.apply_sink(torch.zeros(5, 2, 4), torch.zeros(2, 5), torch.tensor([0.0, INF]))


@runs_on("combine", dtypes=("float32", "bfloat16"))
def test_compiles_without_a_graph_break(target):
    a, b = pair(target, (2, 9))
    sink = torch.randn(2, device=target.device)
    mask = torch.rand(2, 9, device=target.device) < 0.5

    def function(out_a, lse_a, out_b, lse_b):
        out, lse = neginf.apply_sink(*neginf.merge_state(out_a, lse_a, out_b, lse_b), sink)
        neginf.merge_state_in_place(out, lse, out_a, lse_a, mask)
        return out, lse

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*a, *b), function(*a, *b), strict=True):
        judge.assert_bits_equal(got, expected, "compiled")
