"""The oracle and the judge themselves: closed forms, torch's attention, errors they must see."""

import math

import pytest
import torch
from hypothesis import given
from torch.autograd import gradcheck

import judge
import oracle
from problems import Guarded, Inputs, Problem, poisoned_allocations, problems

INF = float("inf")


def test_visible_is_aligned_to_the_bottom_right():
    assert oracle.visible(2, 4, causal=True).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert oracle.visible(3, 1, causal=True).int().tolist() == [[0], [0], [1]]
    window = oracle.visible(3, 5, window_size=(1, 0)).int().tolist()
    assert window == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert oracle.visible(2, 2, window_size=(-1, -1)).all()


@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_torch(causal):
    q, k, v = (torch.randn(2, 7, 4, 8, dtype=torch.float64) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal
    ).transpose(1, 2)
    out, lse = oracle.attention(q, k, v, causal=causal)
    assert torch.allclose(out, expected, atol=1e-14)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(8)
    scores = scores.masked_fill(~oracle.visible(7, 7, causal), -INF)
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-14)


def test_closed_form_of_q_zero():
    k, v = torch.randn(1, 5, 1, 4), torch.randn(1, 5, 1, 4, dtype=torch.float64)
    out, lse = oracle.attention(torch.zeros(1, 7, 1, 4), k, v, causal=True)
    counts = torch.tensor([0, 0, 1, 2, 3, 4, 5.0], dtype=torch.float64)
    assert torch.allclose(lse[0, 0], counts.log(), atol=1e-15)
    means = [v[0, :n, 0].mean(0) if n else torch.zeros(4) for n in range(6)]
    assert torch.allclose(out[0, 2:, 0], torch.stack(means[1:]), atol=1e-15)
    judge.assert_zero(out[:, :2], "rows without keys")


def test_sink_softcap_alibi_by_hand():
    q = torch.full((1, 1, 1, 1), 2.0)
    k, v = torch.tensor([3.0, -1]).view(1, 2, 1, 1), torch.tensor([1.0, 10]).view(1, 2, 1, 1)
    out, lse = oracle.attention(
        q, k, v, softmax_scale=0.5, softcap=2.0, alibi_slopes=torch.tensor([0.25]),
        sink=torch.tensor([0.75]),
    )  # fmt: skip
    a = math.exp(2 * math.tanh(1.5) - 0.25)
    b = math.exp(2 * math.tanh(-0.5))
    total = a + b + math.exp(0.75)
    assert lse.item() == pytest.approx(math.log(total), rel=1e-7)
    assert out.item() == pytest.approx((a + 10 * b) / total, rel=1e-7)


@given(problems(head_dims=(4,)))
def test_poison_is_invisible_to_the_oracle(problem):
    clean = Inputs(problem, torch.float64, poison=False).reference(torch.float64)
    poisoned = Inputs(problem, torch.float64).reference(torch.float64)
    assert not clean[0].isnan().any()
    judge.assert_bits_equal(poisoned[0], clean[0], "out")
    judge.assert_bits_equal(poisoned[1], clean[1], "lse")
    empty = poisoned[1] == -INF
    if problem.sink is None:
        rows = ~Inputs(problem, torch.float64).used_q
        rows = rows[:, None] if not problem.varlen else rows
        assert torch.equal(empty, rows.expand_as(empty))


def test_gradcheck_of_the_oracle():
    problem = Problem(
        lengths_q=(5,), lengths_k=(4,), head_dim=3, causal=True, softcap=3.0, alibi="h",
        sink=(0.5, -1.0),
    )  # fmt: skip
    inputs = Inputs(problem, torch.float64, poison=False)
    options = dict(inputs.options)
    sink = options.pop("sink").requires_grad_()
    q, k, v = (inputs.tensor(n).clone().requires_grad_() for n in "qkv")
    assert gradcheck(
        lambda q, k, v, s: oracle.attention(q, k, v, sink=s, **options), (q, k, v, sink)
    )


def test_gradients_ignore_rows_without_keys():
    problem = Problem(lengths_q=(5,), lengths_k=(3,), causal=True)
    gradients = Inputs(problem, torch.float64).reference_gradients(torch.float64)
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
    judge.assert_zero(gradients["q"][:, :2], "dq")


def test_nan_and_infinity_of_the_oracle():
    q, k, v = (torch.ones(1, n, 1, 2) for n in (2, 3, 3))
    k[0, 2] = INF
    out, lse = oracle.attention(q, k, v, causal=True)
    assert lse.isnan().tolist() == [[[False, True]]]
    assert out.isnan()[0, :, 0, 0].tolist() == [False, True]
    k[0, 2] = -INF
    out, lse = oracle.attention(q, k, v, causal=True)
    assert lse[0, 0, 1] == lse[0, 0, 0]
    assert lse.isfinite().all()


def test_merge_of_the_oracle():
    outs, lses = torch.randn(3, 2, 4, 3, 5), torch.randn(3, 2, 3, 4)
    lses[0, 0] = lses[1, 1] = lses[:, :, 1] = -INF
    outs[0, 0] = float("nan")
    out, lse = oracle.merge(outs, lses)
    assert torch.allclose(lse, lses.double().logsumexp(0), atol=1e-14)
    assert not out.isnan().any()
    judge.assert_zero(out[:, :, 1], "rows whose states are all empty")
    out, lse = oracle.merge(outs[:0], lses[:0])
    judge.assert_state((out, lse), 0, -INF)


def test_judge_sees_errors():
    exact = torch.randn(100, dtype=torch.float64)
    low = exact.to(torch.bfloat16)
    judge.assert_close(low, exact, low, "rounded once")
    for wrong in (low + 0.1, -low, low * 1.05, torch.zeros_like(low)):
        with pytest.raises(AssertionError, match="error"):
            judge.assert_close(wrong, exact, low, "wrong")
    for special in (float("nan"), INF, -INF):
        wrong = low.clone()
        wrong[7] = special
        with pytest.raises(AssertionError, match="positions"):
            judge.assert_close(wrong, exact, low, "special value")
        with pytest.raises(AssertionError, match="positions"):
            judge.assert_close(low, wrong.double(), low, "missing special value")
    with pytest.raises(AssertionError, match="shape"):
        judge.assert_close(low[:1], exact, low, "broadcast")
    with pytest.raises(AssertionError):
        judge.assert_zero(torch.tensor([0.0, float("nan")]), "nan")
    with pytest.raises(AssertionError):
        judge.assert_bits_equal(torch.tensor([0.0]), torch.tensor([-0.0]), "sign")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_allocations_are_poisoned(dtype):
    with poisoned_allocations():
        assert torch.empty(100, dtype=dtype).isnan().all()
        assert torch.empty_like(torch.ones(3, 4, dtype=dtype)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_guard_sees_writes():
    guarded = Guarded(torch.randn(2, 3, 4))
    assert guarded.view.stride(-1) == 1
    assert not guarded.view.is_contiguous()
    guarded.assert_unchanged("tensor")
    guarded.view[0, 0, 0] = 5
    guarded.assert_guard_unchanged("tensor")
    with pytest.raises(AssertionError):
        guarded.assert_unchanged("tensor")
    guarded.buffer[0, 0, 5] = 0
    with pytest.raises(AssertionError):
        guarded.assert_guard_unchanged("tensor")
