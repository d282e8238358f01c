"""NaN honesty (P3), -inf scores (P4) and memory that nobody owns (P5)."""

import pytest
import torch

import judge
import neginf
import oracle
from problems import Inputs, Problem, check_forward
from targets import runs_on

NEG_INF = float("-inf")
INF = float("inf")
NAN = float("nan")

SQ, SK, HEADS, HEADS_K = 70, 90, 4, 2
WINDOWED = Problem(
    lengths_q=(SQ,) * 2, lengths_k=(SK,) * 2, heads=HEADS, heads_k=HEADS_K, head_dim=32,
    window_size=(8, 2),
)  # fmt: skip
BATCH, KEY, HEAD_K = 1, 40, 1


def sees_poisoned():
    """(batch, heads, rows): which rows see key KEY of batch entry BATCH, key head HEAD_K."""
    rows = oracle.visible(SQ, SK, window_size=WINDOWED.window_size)[:, KEY]
    where = torch.zeros(2, HEADS, SQ, dtype=torch.bool)
    where[BATCH, HEAD_K * 2 : HEAD_K * 2 + 2] = rows
    assert 0 < rows.sum() < SQ
    return where


def run(target, change, **changes):
    """(out, lse) with and without the change to (q, k, v)."""
    inputs = Inputs(WINDOWED.with_(**changes), target.dtype, target.device)
    clean = inputs.forward()
    tensors = {n: inputs.tensor(n).clone() for n in "qkv"}
    change(tensors)
    return inputs.call(**tensors), clean


def assert_same_elsewhere(got, clean, where, what):
    """Bit for bit as without the NaN, except where it may reach."""
    kept_got, kept_clean = got.masked_fill(where, 0), clean.masked_fill(where, 0)
    judge.assert_bits_equal(kept_got, kept_clean, what)


@runs_on("forward", "combine")
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("lanes", [slice(None), slice(5, 6)], ids=["all", "one"])
def test_nan_in_k_reaches_the_rows_that_see_it(target, lanes, splits):
    def change(tensors):
        tensors["k"][BATCH, KEY, HEAD_K, lanes] = NAN

    (out, lse), (clean_out, clean_lse) = run(target, change, num_splits=splits)
    where = sees_poisoned()
    assert torch.equal(lse.isnan().cpu(), where)
    assert torch.equal(out.isnan().cpu(), where.mT[..., None].expand(out.shape))
    where = where.to(target.device)
    assert_same_elsewhere(lse, clean_lse, where, "lse")
    assert_same_elsewhere(out, clean_out, where.mT[..., None], "out")


@runs_on("forward")
def test_nan_in_q_reaches_its_row(target):
    def change(tensors):
        tensors["q"][0, 33, 2, 7] = NAN

    (out, lse), (clean_out, clean_lse) = run(target, change)
    where = torch.zeros(2, HEADS, SQ, dtype=torch.bool)
    where[0, 2, 33] = True
    assert torch.equal(lse.isnan().cpu(), where)
    assert torch.equal(out.isnan().cpu(), where.mT[..., None].expand(out.shape))
    where = where.to(target.device)
    assert_same_elsewhere(lse, clean_lse, where, "lse")
    assert_same_elsewhere(out, clean_out, where.mT[..., None], "out")


@runs_on("forward", "combine")
@pytest.mark.parametrize("splits", [1, 3])
def test_nan_in_v_leaves_lse_and_other_heads(target, splits):
    def change(tensors):
        tensors["v"][BATCH, KEY, HEAD_K, 3] = NAN

    (out, lse), (clean_out, clean_lse) = run(target, change, num_splits=splits)
    judge.assert_bits_equal(lse, clean_lse, "lse")
    assert out[..., 3].cpu()[sees_poisoned().mT].isnan().all()
    may_reach = torch.zeros(out.shape, dtype=torch.bool, device=target.device)
    may_reach[BATCH, :, HEAD_K * 2 : HEAD_K * 2 + 2, 3] = True
    assert_same_elsewhere(out, clean_out, may_reach, "out")


@runs_on("forward")
@pytest.mark.parametrize("sign", [1, -1])
def test_infinite_k(target, sign):
    """A score of +inf is NaN (P3); a score of -inf is a key that is not there (P4)."""

    def change(tensors):
        tensors["q"].abs_().clamp_(min=0.125)
        tensors["k"][BATCH, KEY, HEAD_K, 4] = sign * INF

    (out, lse), _ = run(target, change)
    where = sees_poisoned()
    if sign > 0:
        assert torch.equal(lse.isnan().cpu(), where)
        assert torch.equal(out.isnan().cpu(), where.mT[..., None].expand(out.shape))
        return
    assert lse.isfinite().all()
    assert out.isfinite().all()
    inputs = Inputs(WINDOWED, target.dtype, target.device)
    q, k, v = (inputs.tensor(n).cpu() for n in "qkv")
    q = q.abs().clamp(min=0.125)
    k = k.clone()
    k[BATCH, KEY, HEAD_K] = -1e4 if target.dtype != torch.float64 else -1e9  # weight 0
    _, exact = oracle.attention(q, k, v, **inputs.options)
    assert judge.max_error(lse, exact) <= 1e-5


@runs_on("forward")
def test_softcap_makes_an_infinite_product_finite(target):
    """The score is what comes after softcap: tanh(inf) = 1."""
    q = torch.ones(1, 1, 1, 16).to(target.device, target.dtype)
    k = torch.zeros(1, 2, 1, 16).to(q)
    k[0, 1, 0, 0] = INF
    v = torch.tensor([0.0, 1.0]).to(q).view(1, 2, 1, 1).expand(1, 2, 1, 16)
    out, lse = neginf.flash_attn_func(q, k, v, softcap=2.0, return_lse=True)
    exact = torch.tensor([0.0, 2.0], dtype=torch.float64)
    assert lse.item() == pytest.approx(exact.logsumexp(0).item(), rel=1e-6)
    assert out[0, 0, 0, 0].item() == pytest.approx(exact.softmax(0)[1].item(), rel=1e-2)


@runs_on("forward", dtypes=("float32", "bfloat16", "float16"))
def test_bias_of_minus_infinity(target):
    """ALiBi that is -inf in float32 from a distance of 2 on: such keys weigh nothing."""
    q = torch.randn(1, 5, 1, 16).to(target.device, target.dtype)
    k, v = torch.randn(1, 2, 1, 16).to(q), torch.randn(1, 2, 1, 16).to(q)
    slopes = torch.tensor([2e38], device=target.device)
    out, lse = neginf.flash_attn_func(q, k, v, alibi_slopes=slopes, return_lse=True)
    # Row i lies at distance |i - 3 - j| of key j: rows 0 and 1 are 2 or more away from both.
    assert lse[0, 0, :2].isneginf().all()
    judge.assert_zero(out[:, :2], "rows whose scores are all -inf")
    for row, key in ((3, 0), (4, 1)):
        judge.assert_bits_equal(out[0, row, 0], v[0, key, 0], f"row {row}")
        raw = (q[0, row, 0].double() @ k[0, key, 0].double()).item() / 4
        assert lse[0, 0, row].item() == pytest.approx(raw, abs=1e-5)


@runs_on("forward", "backward", dtypes=("float32", "bfloat16", "float16"))
def test_bias_of_minus_infinity_backward(target):
    q = torch.randn(1, 5, 1, 16).to(target.device, target.dtype).requires_grad_()
    k, v = (torch.randn(1, 2, 1, 16).to(q).detach().requires_grad_() for _ in range(2))
    slopes = torch.tensor([2e38], device=target.device)
    out, lse = neginf.flash_attn_func(q, k, v, alibi_slopes=slopes, return_lse=True)
    dout, dlse = torch.randn(out.shape).to(out), torch.zeros_like(lse)
    dout[:, :2], dlse[..., :2] = NAN, NAN
    dq, dk, dv = torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])
    judge.assert_zero(dq[:, :2], "dq of rows whose scores are all -inf")
    assert dk.isfinite().all()
    for key, row in ((0, 3), (1, 4)):
        # Row 2 lies at distance 1 of key 0: -2e38, the only key it has left.
        rows = dout[0, [2, 3], 0] if key == 0 else dout[0, [row], 0]
        exact = rows.double().sum(0)
        error = (dv[0, key, 0].double() - exact).abs().max()
        assert error <= torch.finfo(target.dtype).eps * (1 + exact.abs().max())


@runs_on("forward")
def test_nan_and_infinite_slopes(target):
    accumulate = torch.promote_types(target.dtype, torch.float32)
    q = torch.randn(1, 3, 3, 16).to(target.device, target.dtype)
    slopes = torch.tensor([0.5, NAN, INF], dtype=accumulate, device=target.device)
    k = q[:, :2]
    out, lse = neginf.flash_attn_func(q, k, k, causal=True, alibi_slopes=slopes, return_lse=True)
    assert lse[0, :, 0].isneginf().all()  # sees no key, whatever the bias
    judge.assert_zero(out[:, 0], "row without keys")
    assert lse[0, 0, 1:].isfinite().all()
    assert lse[0, 1, 1:].isnan().all()
    assert lse[0, 2, 1:].isnan().all()  # inf * 0 on the diagonal
    assert out[0, 1:, 1:].isnan().all()


@runs_on("forward")
@pytest.mark.parametrize("sink", [NAN, INF])
def test_sink_that_is_not_a_score(target, sink):
    """The merged row is NaN as a whole, also without keys: never (0, NaN)."""
    accumulate = torch.promote_types(target.dtype, torch.float32)
    q = torch.randn(1, 3, 2, 16).to(target.device, target.dtype)
    sinks = torch.tensor([0.5, sink], dtype=accumulate, device=target.device)
    out, lse = neginf.flash_attn_func(
        q, q[:, :2], q[:, :2], causal=True, sink=sinks, return_lse=True
    )
    assert lse[0, 0].isfinite().all()
    assert out[:, :, 0].isfinite().all()
    assert lse[0, 1].isnan().all()
    assert out[:, :, 1].isnan().all()


@runs_on("forward")
def test_empty_rows_stay_empty_beside_nan(target):
    """Rows without keys are (0, -inf) although every key and query is NaN."""
    for causal in (False, True):
        q = torch.full((1, 70, 2, 32), NAN).to(target.device, target.dtype)
        k = torch.full((1, 20 if causal else 0, 2, 32), NAN).to(q)
        out, lse = neginf.flash_attn_func(q, k, k, causal=causal, return_lse=True)
        empty = 50 if causal else 70
        judge.assert_state((out[:, :empty], lse[..., :empty]), 0, NEG_INF)
        assert lse[..., empty:].isnan().all()
        assert out[:, empty:].isnan().all()


@runs_on("forward", "backward")
@pytest.mark.parametrize("poisoned", ["q", "k", "v", "dout"])
def test_empty_rows_have_no_gradient_beside_nan(target, poisoned):
    """dq of a row without keys is exactly 0, whatever the rows beside it bring into the sums."""
    q, k, v, dout = (
        torch.randn(1, n, 2, 32).to(target.device, target.dtype) for n in (70, 20, 20, 70)
    )
    tensors = {"q": q, "k": k, "v": v, "dout": dout}
    tensors[poisoned][:, -7:] = NAN
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = neginf.flash_attn_func(*leaves, causal=True, return_lse=True)
    judge.assert_state((out.detach()[:, :50], lse.detach()[..., :50]), 0, NEG_INF)
    dq, _, dv = torch.autograd.grad([out, lse], leaves, [dout, torch.ones_like(lse)])
    judge.assert_zero(dq[:, :50], "dq of rows without keys")
    assert dv.isnan().any() == (poisoned != "v")
    assert dq.isnan().any()


@runs_on("forward")
def test_memory_nobody_owns(target):
    """NaN, inf and huge values past seqused, before a window, after the diagonal, past the end."""
    problem = Problem(
        lengths_q=(5,) * 2, lengths_k=(150,) * 2, window_size=(3, 0), used_k=(100, 7), head_dim=32
    )
    for value in (NAN, INF, NEG_INF, 6e4):
        inputs = Inputs(problem, target.dtype, target.device, poison=False)
        expected = inputs.forward()
        for name in "kv":
            inputs.tensor(name)[~inputs.used_k.to(target.device)] = value
        assert not inputs.used_k.all()
        out, lse = inputs.call(*(inputs.tensor(n) for n in "qkv"))
        judge.assert_bits_equal(out, expected[0], f"out beside {value}")
        judge.assert_bits_equal(lse, expected[1], f"lse beside {value}")


@runs_on("forward", "backward")
def test_nan_stays_in_its_head_and_batch_entry(target):
    """Backward: what a NaN key's rows do not touch has the gradient it had; they have NaN."""
    inputs = Inputs(WINDOWED.with_(deterministic=True), target.dtype, target.device, poison=False)
    _, _, clean = inputs.gradients()
    inputs.tensor("k")[BATCH, KEY, HEAD_K] = NAN
    leaves = [inputs.tensor(n).detach().requires_grad_() for n in "qkv"]
    out, lse = inputs.call(*leaves)
    got = torch.autograd.grad(
        [out, lse], leaves, [inputs.tensor("dout"), inputs.dlse.to(target.device)]
    )
    rows = sees_poisoned()
    for name, gradient in zip("qkv", got, strict=True):
        heads = slice(HEAD_K * 2, HEAD_K * 2 + 2) if name == "q" else slice(HEAD_K, HEAD_K + 1)
        may_reach = torch.zeros(gradient.shape, dtype=torch.bool, device=target.device)
        may_reach[BATCH, :, heads] = True
        assert_same_elsewhere(gradient, clean[name], may_reach, f"d{name}")
    assert got[0].cpu()[rows.mT].isnan().all()
    assert got[1][BATCH, KEY, HEAD_K].isnan().all()
    assert got[2][BATCH, KEY, HEAD_K].isnan().all()


@runs_on("forward", "backward")
def test_nan_query_stays_in_its_head_and_batch_entry(target):
    """Backward: NaN for its own row and the keys it sees; other heads as before."""
    inputs = Inputs(WINDOWED.with_(deterministic=True), target.dtype, target.device, poison=False)
    _, _, clean = inputs.gradients()
    row = 30
    inputs.tensor("q")[BATCH, row, HEAD_K * 2] = NAN
    leaves = [inputs.tensor(n).detach().requires_grad_() for n in "qkv"]
    out, lse = inputs.call(*leaves)
    got = torch.autograd.grad(
        [out, lse], leaves, [inputs.tensor("dout"), inputs.dlse.to(target.device)]
    )
    keys = oracle.visible(SQ, SK, window_size=WINDOWED.window_size)[row].to(target.device)
    assert got[0][BATCH, row, HEAD_K * 2].isnan().all()
    assert got[2][BATCH, keys, HEAD_K].isnan().all()
    other = torch.ones(2, HEADS_K, dtype=torch.bool)
    other[BATCH, HEAD_K] = False
    for name, gradient in zip("kv", got[1:], strict=True):
        judge.assert_bits_equal(
            gradient.transpose(1, 2)[other.to(target.device)],
            clean[name].transpose(1, 2)[other.to(target.device)],
            f"d{name} of other heads",
        )


@runs_on("forward")
def test_very_low_scores_are_not_masks(target):
    """Rows whose every score is very negative keep their keys."""
    problem = Problem(lengths_q=(3,), lengths_k=(70,), head_dim=16)
    inputs = Inputs(problem, target.dtype, target.device)
    inputs.tensor("q").fill_(-100.0)
    inputs.tensor("k").fill_(100.0)
    for guarded in inputs.guarded.values():
        guarded.before = guarded.buffer.clone()
    out, lse = check_forward(inputs)
    assert lse.flatten()[0].item() == pytest.approx(
        -40000 + torch.tensor(70.0).log().item(), rel=1e-6
    )
    mean = inputs.tensor("v").double().mean(1, keepdim=True).repeat_interleave(2, 2)
    assert (out.double() - mean).abs().max() <= 4 * torch.finfo(target.dtype).eps
