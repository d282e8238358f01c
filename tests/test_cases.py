"""Failures that users of other attention libraries reported, reduced to small inputs.

Each test is named after the repository and number it comes from. "(0, -inf)" is an output row of
exact zeros with a log-sum-exp of -inf. Outputs are full of NaN before each call.
"""

import math

import pytest
import torch

import judge
import neginf
import oracle
from problems import (
    Guarded,
    Inputs,
    Problem,
    check_forward,
    check_gradients,
    check_state,
    int32,
    poisoned_allocations,
)
from targets import HALF, runs_on

NEG_INF = float("-inf")
NAN = float("nan")
INF = float("inf")


def dense(*args, **kwargs):
    with poisoned_allocations():
        return neginf.flash_attn_func(*args, return_lse=True, **kwargs)


def packed(*args, **kwargs):
    with poisoned_allocations():
        return neginf.flash_attn_varlen_func(*args, return_lse=True, **kwargs)


def merge(*states):
    with poisoned_allocations():
        return neginf.merge_states(*zip(*states, strict=True))


def randn(target, *shape):
    return torch.randn(*shape).to(target.device, target.dtype)


def accumulate(target):
    return torch.promote_types(target.dtype, torch.float32)


@runs_on("forward")
def test_flash_attention_pr_978_forward(target):
    q, k = randn(target, 1, 1, 1, 64), randn(target, 1, 0, 1, 64)
    judge.assert_state(dense(q, k, k), 0, NEG_INF)


@runs_on("forward", "backward")
def test_flash_attention_pr_978(target):
    q, k, v = (randn(target, 1, n, 1, 64).requires_grad_() for n in (1, 0, 0))
    out, lse = dense(q, k, v)
    judge.assert_state((out.detach(), lse.detach()), 0, NEG_INF)
    dout = torch.full_like(out, NAN)
    dq, dk, dv = torch.autograd.grad([out, lse], [q, k, v], [dout, torch.full_like(lse, NAN)])
    judge.assert_zero(dq, "dq")
    assert dk.shape == dv.shape == (1, 0, 1, 64)


@runs_on("forward")
def test_flashinfer_4451_pr_4401(target):
    """A very low score is not a mask: raw q.k = -524288 gives LSE = -46341."""
    q = torch.full((1, 1, 1, 128), -64.0).to(target.device, target.dtype)
    k, v = torch.full_like(q, 64.0), torch.ones_like(q)
    out, lse = dense(q, k, v)
    judge.assert_bits_equal(out, v, "out")
    assert lse.item() == pytest.approx(-524288 / math.sqrt(128), rel=2e-7)


@runs_on("forward")
@pytest.mark.parametrize("varlen", [False, True])
def test_flashinfer_pr_4975(target, varlen):
    """Two requests with [0, 5] keys."""
    lengths = {"lengths_k": (0, 5)} if varlen else {"lengths_k": (5, 5), "used_k": (0, 5)}
    problem = Problem(lengths_q=(1, 1), varlen=varlen, head_dim=64, **lengths)
    out, lse = check_forward(Inputs(problem, target.dtype, target.device))
    lse = lse.T if varlen else lse
    judge.assert_state((out[0], lse[0]), 0, NEG_INF)
    assert lse[1].isfinite().all()


@runs_on("forward")
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_pr_2470(target, causal):
    q, k = randn(target, 1, 1, 1, 128), randn(target, 1, 0, 1, 128)
    judge.assert_state(dense(q, k, k, causal=causal), 0, NEG_INF)


@runs_on("forward")
def test_flash_attention_1778(target):
    q, k, v = randn(target, 1, 2, 1, 64), randn(target, 1, 1, 1, 64), randn(target, 1, 1, 1, 64)
    out, lse = dense(q, k, v, causal=True)
    judge.assert_state((out[:, 0], lse[..., 0]), 0, NEG_INF)
    judge.assert_bits_equal(out[:, 1], v[:, 0], "row 1 sees the only key")
    exact = (q[0, 1, 0].double() @ k[0, 0, 0].double()).item() / 8
    assert lse[0, 0, 1].item() == pytest.approx(exact, abs=1e-5)


@runs_on("forward")
def test_flash_attention_pr_1155(target):
    problem = Problem(lengths_q=(1, 1), lengths_k=(0, 1), varlen=True, head_dim=64)
    out, lse = check_forward(Inputs(problem, target.dtype, target.device))
    judge.assert_state((out[0], lse[:, 0]), 0, NEG_INF)


@runs_on("combine")
def test_vllm_pr_15492(target):
    """+inf is not a way to say empty: rejected where checked, else NaN; never wipes silently."""
    out = randn(target, 2, 1, 1, 1, 64)
    lse = torch.tensor([INF, 0.5], dtype=accumulate(target), device=target.device).view(2, 1, 1, 1)
    if target.device == "cpu":
        with pytest.raises(ValueError, match=r"\+inf"):
            neginf.flash_attn_combine(out, lse)
        with pytest.raises(ValueError, match=r"\+inf"):
            neginf.merge_states(list(out), list(lse))
    else:
        judge.assert_state(neginf.flash_attn_combine(out, lse), NAN, NAN)
    lse[0] = NEG_INF  # what it should have been
    judge.assert_state(neginf.flash_attn_combine(out, lse), out[1].cpu(), 0.5)


@runs_on("combine")
def test_vllm_27491_pr_39148_flashinfer_4051(target):
    empty = torch.zeros(1, 1, 1, 64).to(target.device, target.dtype)
    nothing = torch.full((1, 1, 1), NEG_INF, dtype=accumulate(target), device=target.device)
    judge.assert_state(merge((empty, nothing), (empty, nothing)), 0, NEG_INF)

    outs = randn(target, 2, 128, 32, 16)
    lses = torch.randn(2, 32, 128).to(nothing)
    both = torch.rand(32, 128) < 0.25
    lses[:, both] = NEG_INF
    lses[0, torch.rand(32, 128) < 0.25] = NEG_INF
    forwards = merge(*zip(outs, lses, strict=True))
    backwards = merge(*zip(outs.flip(0), lses.flip(0), strict=True))
    empty_rows = (lses == NEG_INF).all(0)
    assert empty_rows.sum() >= both.sum() > 500
    for out, lse in (forwards, backwards):
        assert torch.equal(lse == NEG_INF, empty_rows)
        judge.assert_zero(out[empty_rows.T], "rows that are empty in both")
        assert lse[~empty_rows].isfinite().all()
    eps = torch.finfo(target.dtype).eps
    assert judge.max_error(forwards[0], backwards[0].cpu()) <= 4 * eps
    assert judge.max_error(forwards[1], backwards[1].cpu()) <= 1e-6


@runs_on("forward", "combine")
def test_vllm_pr_38416(target):
    """Five keys over eight shards: the last three shards are empty and weigh exactly 0."""
    q, k, v = randn(target, 1, 3, 2, 64), randn(target, 1, 5, 2, 64), randn(target, 1, 5, 2, 64)
    shards = [dense(q, k[:, i : i + 1], v[:, i : i + 1]) for i in range(8)]
    for state in shards[5:]:
        judge.assert_state(state, 0, NEG_INF)
    poisoned = [(torch.full_like(out, NAN), lse) for out, lse in shards[5:]]
    with_empty = merge(*shards[:5], *poisoned)
    without = merge(*shards[:5])
    judge.assert_bits_equal(with_empty[0], without[0], "out")
    judge.assert_bits_equal(with_empty[1], without[1], "lse")
    exact = oracle.attention(q.cpu(), k.cpu(), v.cpu())
    assert judge.max_error(with_empty[1], exact[1]) <= 1e-5
    assert judge.max_error(with_empty[0], exact[0]) <= 4 * torch.finfo(target.dtype).eps


@runs_on("forward", "combine")
def test_sglang_40903_flashinfer_4485(target):
    """q = 0; 3072 keys merged with 64."""
    q = torch.zeros(1, 1, 1, 64).to(target.device, target.dtype)
    prefix, suffix = torch.ones(1, 3072, 1, 64).to(q), torch.zeros(1, 64, 1, 64).to(q)
    a, b = dense(q, prefix, prefix), dense(q, suffix, suffix)
    assert a[1].item() == pytest.approx(math.log(3072), rel=1e-6)
    assert b[1].item() == pytest.approx(math.log(64), rel=1e-6)
    out, lse = merge(a, b)
    assert lse.item() == pytest.approx(math.log(3136), rel=1e-6)
    eps = torch.finfo(target.dtype).eps
    assert (1 - out.double()).max().item() == pytest.approx(64 / 3136, abs=4 * eps)
    swapped, _ = merge((1 - a[0], a[1]), (1 - b[0], b[1]))
    assert swapped.double().max().item() == pytest.approx(64 / 3136, rel=eps + 1e-5)


@runs_on("combine")
def test_vllm_pr_21996(target):
    """lse = base.t(): its strides are honoured."""
    outs = randn(target, 2, 3, 2, 64)
    bases = torch.randn(2, 3, 2).to(target.device, accumulate(target))
    lses = [base.t() for base in bases]
    assert lses[0].stride() == (1, 2)
    strided = merge(*zip(outs, lses, strict=True))
    contiguous = merge(*((o, s.contiguous()) for o, s in zip(outs, lses, strict=True)))
    judge.assert_bits_equal(strided[0], contiguous[0], "out")
    judge.assert_bits_equal(strided[1], contiguous[1], "lse")
    through_combine = neginf.flash_attn_combine(outs, bases.mT)
    judge.assert_bits_equal(through_combine[0], contiguous[0], "out")
    judge.assert_bits_equal(through_combine[1], contiguous[1], "lse")


@runs_on("combine")
def test_vllm_fork_pr_15(target):
    """One operand is buf[..., :128] of a 192-wide buffer."""
    prefix, wide = randn(target, 3, 2, 128), randn(target, 3, 2, 192)
    lses = torch.randn(2, 2, 3).to(target.device, accumulate(target))
    strided = merge((prefix, lses[0]), (wide[..., :128], lses[1]))
    contiguous = merge((prefix, lses[0]), (wide[..., :128].contiguous(), lses[1]))
    judge.assert_bits_equal(strided[0], contiguous[0], "out")
    exact = oracle.merge(torch.stack([prefix, wide[..., :128]]).cpu(), lses.cpu())
    assert judge.max_error(strided[0], exact[0]) <= 2 * torch.finfo(target.dtype).eps * 4


@runs_on("combine")
def test_ring_flash_attention_pr_30(target):
    outs = randn(target, 2, 1, 1, 1, 64)

    def state(i, value):
        lse = torch.full((1, 1, 1), value, dtype=accumulate(target), device=target.device)
        return outs[i], lse

    out, lse = merge(state(0, 0.0), state(1, 200.0))
    assert lse.item() == 200.0
    judge.assert_bits_equal(out, outs[1], "out")
    judge.assert_state(merge(state(0, NEG_INF), state(1, NEG_INF)), 0, NEG_INF)
    judge.assert_state(merge(state(0, NEG_INF), state(1, 3.5)), outs[1].cpu(), 3.5)
    judge.assert_state(merge(state(0, 3.5), state(1, NEG_INF)), outs[0].cpu(), 3.5)


@runs_on("combine")
def test_flash_attention_pr_2388(target):
    """Partials whose splits are further apart than they are large."""
    outs = randn(target, 4, 2, 9, 3, 64)
    lses = torch.randn(4, 2, 3, 9).to(target.device, accumulate(target))
    padded_out = torch.full((4, 3, 9, 3, 64), NAN).to(outs)
    padded_lse = torch.full((4, 3, 3, 9), NAN).to(lses)
    padded_out[:, :2], padded_lse[:, :2] = outs, lses
    got = neginf.flash_attn_combine(padded_out[:, :2], padded_lse[:, :2])
    expected = neginf.flash_attn_combine(outs, lses)
    judge.assert_bits_equal(got[0], expected[0], "out")
    judge.assert_bits_equal(got[1], expected[1], "lse")


@runs_on("forward", "combine")
def test_flaggems_5235(target):
    """Contiguous (1, 17, 2, 64), split and not."""
    problem = Problem(lengths_q=(17,), lengths_k=(17,), heads=2, heads_k=2, head_dim=64)
    inputs = Inputs(problem, target.dtype, target.device)
    q, k, v = (inputs.tensor(n).contiguous() for n in "qkv")
    for splits in (1, 2, 17, 0):
        check_state(inputs, *dense(q, k, v, num_splits=splits))


@runs_on("forward", "combine")
def test_flashinfer_pr_4401_more_splits_than_tiles(target):
    q, k, v = (randn(target, 1, n, 2, 64) for n in (3, 1, 1))
    whole, split = dense(q, k, v, num_splits=1), dense(q, k, v, num_splits=4)
    judge.assert_bits_equal(split[0], whole[0], "out")
    assert judge.max_error(split[1], whole[1].cpu()) <= 1e-6
    assert split[1].isfinite().all()


def varlen_leaves(target, total_q, total_k, heads, head_dim):
    return tuple(
        randn(target, total, heads, head_dim).requires_grad_()
        for total in (total_q, total_k, total_k)
    )


@runs_on("forward", "backward")
def test_flash_attention_443(target):
    """Long causal sequences over one key each: all rows but the last are empty."""
    q, k, v = varlen_leaves(target, 256, 3, 1, 32)
    cu_q, cu_k = int32([0, 76, 110, 256], target.device), int32([0, 1, 2, 3], target.device)
    out, lse = packed(q, k, v, cu_q, cu_k, 146, 1, causal=True)
    last = torch.tensor([75, 109, 255], device=target.device)
    empty = torch.ones(256, dtype=torch.bool, device=target.device)
    empty[last] = False
    judge.assert_state((out.detach()[empty], lse.detach()[:, empty]), 0, NEG_INF)
    dout = randn(target, 256, 1, 32)
    dout[empty] = NAN
    dq, dk, dv = torch.autograd.grad(out, [q, k, v], dout)
    judge.assert_zero(dq[empty], "dq of empty rows")
    eps = torch.finfo(target.dtype).eps
    # P = 1, so dS = 0 up to the order in which dP and D are summed.
    assert dq.abs().max() <= 16 * eps
    assert dk.abs().max() <= 16 * eps
    judge.assert_bits_equal(dv, dout[last], "dv")


@runs_on("forward", "backward")
def test_flash_attention_2562_pr_2568_pr_2421(target):
    head_dim = min(256, target.max_head_dim)
    q, k, v = varlen_leaves(target, 1, 2, 1, head_dim)
    cu_q, cu_k = int32([0, 0, 1], target.device), int32([0, 1, 2], target.device)
    for causal in (False, True):
        out, _ = packed(q, k, v, cu_q, cu_k, 1, 1, causal=causal)
        dout = randn(target, 1, 1, head_dim)
        _, dk, dv = torch.autograd.grad(out, [q, k, v], dout)
        judge.assert_zero(dk[0], "dk of the key no query is paired with")
        judge.assert_zero(dv[0], "dv of the key no query is paired with")
        judge.assert_bits_equal(dv[1], dout[0], "dv of the other")


@runs_on("forward", "backward")
def test_flash_attention_pr_1936(target):
    """65 rows against a 64-row tile, some of them empty; the saved LSE stays as it was."""
    problem = Problem(lengths_q=(65,), lengths_k=(60,), causal=True, head_dim=64)
    inputs = Inputs(problem, target.dtype, target.device)
    check_gradients(inputs)
    q, k, v = (inputs.tensor(n).detach().requires_grad_() for n in "qkv")
    out, lse = dense(q, k, v, causal=True)
    saved = lse.detach().clone()
    torch.autograd.grad(out, [q, k, v], inputs.tensor("dout"))
    judge.assert_bits_equal(lse.detach(), saved, "the saved lse")


@runs_on("forward")
def test_flash_attention_1745_2374(target):
    q, k, v = (randn(target, 1, n, 1, 64) for n in (1, 2, 2))
    k[:, 1] = v[:, 1] = NAN
    used = int32([1], target.device)
    out, lse = dense(q, k, v, seqused_k=used)
    judge.assert_bits_equal(out[0, 0], v[0, 0], "out")
    assert lse.isfinite().all()
    judge.assert_state(dense(q, k, v, seqused_k=used - 1), 0, NEG_INF)


@runs_on("forward")
def test_flash_attention_pr_1025(target):
    """Softcap before the mask: row 0 gives key 1 a weight of exactly 0."""
    q, k = randn(target, 1, 2, 1, 64), randn(target, 1, 2, 1, 64)
    v = torch.tensor([1.0, 1e4]).to(q).view(1, 2, 1, 1).expand(1, 2, 1, 64)
    out, lse = dense(q, k, v, softcap=1.0, causal=True)
    judge.assert_bits_equal(out[:, 0], v[:, 0], "row 0")
    raw = (q[0, 0, 0].double() @ k[0, 0, 0].double()).item() / 8
    assert lse[0, 0, 0].item() == pytest.approx(math.tanh(raw), abs=1e-5)


@runs_on("forward")
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_907(target, varlen, causal):
    """One ALiBi formula, aligned to the bottom-right corner, dense and packed."""
    problem = Problem(
        lengths_q=(3,) * 2, lengths_k=(9,) * 2, varlen=varlen, alibi="bh", causal=causal
    )
    inputs = Inputs(problem, target.dtype, target.device)
    check_forward(inputs)
    slope = torch.tensor([0.5], dtype=accumulate(target), device=target.device)
    q = torch.zeros(1, 2, 1, 16).to(target.device, target.dtype)
    k = randn(target, 1, 4, 1, 16)
    _, lse = dense(q, k, k, alibi_slopes=slope, causal=causal)
    keys = range(3) if causal else range(4)
    exact = math.log(sum(math.exp(-0.5 * abs(0 + 4 - 2 - j)) for j in keys))
    assert lse[0, 0, 0].item() == pytest.approx(exact, rel=1e-6)


@runs_on("forward", "backward")
def test_pytorch_136232(target):
    """A loss on out * exp(lse), rows without keys among others: every gradient is finite."""
    q, k, v = (randn(target, 1, n, 2, 16).requires_grad_() for n in (9, 4, 4))
    out, lse = dense(q, k, v, causal=True)
    loss = (out * lse.exp().transpose(1, 2).unsqueeze(-1)).sum() + lse[..., 5:].sum()
    gradients = torch.autograd.grad(loss, [q, k, v])
    for gradient in gradients:
        assert gradient.isfinite().all()
    judge.assert_zero(gradients[0][:, :5], "dq of rows without keys")
    leaves = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    out, lse = oracle.attention(*leaves, causal=True)
    loss = (out * lse.exp().transpose(1, 2).unsqueeze(-1)).sum() + lse[..., 5:].sum()
    for got, exact in zip(gradients, torch.autograd.grad(loss, leaves), strict=True):
        eps = max(torch.finfo(target.dtype).eps, 1e-9)
        assert judge.max_error(got, exact) <= 8 * eps * judge.largest(exact)


@runs_on("forward", "backward")
def test_flash_attention_334(target):
    q, k, v = (randn(target, 1, 1, 1, 16).requires_grad_() for _ in range(3))
    out, _ = dense(q, k, v)
    dout = randn(target, 1, 1, 1, 16)
    dq, dk, dv = torch.autograd.grad(out, [q, k, v], dout)
    eps = torch.finfo(target.dtype).eps
    assert dq.abs().max() <= 16 * eps
    assert dk.abs().max() <= 16 * eps
    judge.assert_bits_equal(dv, dout, "dv")
    judge.assert_bits_equal(out.detach(), v.detach(), "out")


@runs_on("forward", "backward")
def test_tilelang_pr_2461(target):
    """Three rows in a 64-row tile, everything around q and dout full of NaN."""
    problem = Problem(lengths_q=(3,), lengths_k=(70,), head_dim=64)
    check_gradients(Inputs(problem, target.dtype, target.device))


@runs_on("forward", dtypes=("float64", "float32", "bfloat16"))
def test_pytorch_121558(target):
    """Scores of 1.4e11: finite, out = v."""
    q = torch.full((1, 1, 1, 64), 133120.0).to(target.device, target.dtype)
    out, lse = dense(q, q, q)
    judge.assert_bits_equal(out, q, "out")
    assert lse.item() == pytest.approx(133120.0**2 * 8, rel=1e-6)


@runs_on("forward", "backward")
@pytest.mark.parametrize("head_dim", [59, 57, 3])
def test_flash_attention_1347(target, head_dim):
    """The padding of head_dim never reaches a gradient; memory beside the lanes is NaN."""
    problem = Problem(lengths_q=(20,), lengths_k=(30,), head_dim=head_dim, causal=True)
    gradients = check_gradients(Inputs(problem, target.dtype, target.device))
    assert gradients["q"].shape[-1] == head_dim
    assert all(g.is_contiguous() for g in gradients.values())


@runs_on("forward")
def test_flash_attention_2886(target):
    q, k, v = (randn(target, 1, 20, 3, 64) for _ in range(3))
    first = dense(q, k, v)
    q, k = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k))
    second = dense(q, k, v)
    judge.assert_bits_equal(first[0], second[0], "out")
    judge.assert_bits_equal(first[1], second[1], "lse")


@runs_on("forward", dtypes=HALF)
def test_flash_attention_2611(target):
    """A row stride that takes row 1 past 2^31 elements; untouched pages cost no memory."""
    stride = 2**31 + 64
    storage = torch.empty(2 * stride + 64, dtype=target.dtype, device=target.device)
    views = [
        storage.as_strided((1, 2, 1, 16), (0, stride, 16, 1), offset) for offset in (0, 16, 32)
    ]
    values = [randn(target, 1, 2, 1, 16) for _ in views]
    for view, value in zip(views, values, strict=True):
        view.copy_(value)
    got, expected = neginf.flash_attn_func(*views, return_lse=True), dense(*values)
    judge.assert_bits_equal(got[0], expected[0], "out")
    judge.assert_bits_equal(got[1], expected[1], "lse")


@runs_on("forward", "backward", dtypes=("bfloat16",))
def test_flash_attention_2611_backward(target):
    stride = 2**31 + 64
    storage = torch.empty(2 * stride + 64, dtype=target.dtype, device=target.device)
    views = [storage.as_strided((1, 2, 1, 16), (0, stride, 16, 1), 16 * i) for i in range(4)]
    values = [randn(target, 1, 2, 1, 16) for _ in views]
    for view, value in zip(views, values, strict=True):
        view.copy_(value)

    def gradients(q, k, v, dout):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(
            neginf.flash_attn_func(*leaves, deterministic=True), leaves, dout
        )

    for got, expected in zip(gradients(*views), gradients(*values), strict=True):
        judge.assert_bits_equal(got, expected, "gradient")


@runs_on("combine", dtypes=HALF)
def test_flash_attention_2611_combine(target):
    stride = 2**31 + 64
    storage = torch.empty(stride + 64, dtype=target.dtype, device=target.device)
    view = storage.as_strided((2, 1, 1, 1, 16), (stride, 16, 16, 16, 1))
    values = randn(target, 2, 1, 1, 1, 16)
    view.copy_(values)
    lse = torch.randn(2, 1, 1, 1).to(target.device)
    got, expected = neginf.flash_attn_combine(view, lse), neginf.flash_attn_combine(values, lse)
    judge.assert_bits_equal(got[0], expected[0], "out")


@runs_on("forward", dtypes=("bfloat16",))
def test_flash_attention_pr_1500(target):
    """Batch 10,000, every entry with its own length."""
    batch = 10_000
    q = torch.zeros(batch, 1, 2, 16).to(target.device, target.dtype)
    k = torch.ones(batch, 3, 1, 16).to(q) * (torch.arange(batch) % 7).to(q)[:, None, None, None]
    used = (torch.arange(batch) % 4).int().to(target.device)
    out, lse = dense(q, k, k, seqused_k=used)
    exact = used.double().log().cpu()[:, None, None].expand(batch, 2, 1)
    judge.assert_special_positions_equal(lse, exact, "lse")
    assert judge.max_error(lse, exact) <= 1e-6
    expected = torch.where(used[:, None, None, None] > 0, k[:, :1], 0).expand(batch, 1, 2, 16)
    judge.assert_bits_equal(out, expected.contiguous(), "out")


@runs_on("forward", "backward", dtypes=("bfloat16",))
def test_flash_attention_pr_1500_backward(target):
    batch = 10_000
    q = torch.zeros(batch, 1, 1, 16).to(target.device, target.dtype).requires_grad_()
    k = torch.ones(batch, 2, 1, 16).to(target.device, target.dtype).requires_grad_()
    dout = (torch.arange(batch) % 7).to(q).view(batch, 1, 1, 1).expand(batch, 1, 1, 16).detach()
    _, dv = torch.autograd.grad(dense(q, k.detach(), k)[0], [q, k], dout)
    judge.assert_bits_equal(dv, (dout / 2).expand(batch, 2, 1, 16).contiguous(), "dv")


@runs_on("forward")
def test_pytorch_187872(target):
    problem = Problem(lengths_q=(1, 3), lengths_k=(1, 3), heads=2, varlen=True)
    _, lse = check_forward(Inputs(problem, target.dtype, target.device))
    assert lse.shape == (2, 4)
    assert lse.is_contiguous()
    problem = Problem(lengths_q=(3,) * 5, lengths_k=(3,) * 5, heads=2)
    _, lse = check_forward(Inputs(problem, target.dtype, target.device))
    assert lse.shape == (5, 2, 3)
    assert lse.is_contiguous()


@runs_on("forward", "backward")
def test_megatron_lm_1764(target):
    """Two shards of four tokens, four real tokens in all: shard 1 has only masked rows."""
    used = int32([0], target.device)
    q, k, v = (randn(target, 1, 4, 2, 16).requires_grad_() for _ in range(3))
    out, lse = dense(q, k, v, seqused_q=used, seqused_k=used)
    judge.assert_state((out.detach(), lse.detach()), 0, NEG_INF)
    loss = out.square().sum()
    assert loss.isfinite()
    for name, gradient in zip("qkv", torch.autograd.grad(loss, [q, k, v]), strict=True):
        judge.assert_zero(gradient, f"d{name}")


@runs_on("forward", "backward")
def test_xformers_722(target):
    """Two documents of 64 tokens: as packed sequences, equal to each on its own, no NaN."""
    problem = Problem(lengths_q=(64, 64), lengths_k=(64, 64), varlen=True, head_dim=32, causal=True)
    inputs = Inputs(problem, target.dtype, target.device)
    check_gradients(inputs)
    # A window that leaves whole tiles of 64 keys out of a row's sight.
    far = Problem(lengths_q=(64,), lengths_k=(256,), head_dim=32, window_size=(10, 0))
    check_gradients(Inputs(far, target.dtype, target.device))


@runs_on("forward", "backward", dtypes=("bfloat16",))
def test_flash_attention_1254(target):
    """q lengths [0, 0, 1023], k lengths [0, 1, 2045]: ends, and the unpaired key gets 0."""
    q, k, v = varlen_leaves(target, 1023, 2046, 32, 128)
    cu_q = int32([0, 0, 0, 1023], target.device)
    cu_k = int32([0, 0, 1, 2046], target.device)
    out, lse = packed(q, k, v, cu_q, cu_k, 1023, 2045, causal=True)
    assert lse.isfinite().all()
    gradients = torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
    judge.assert_zero(gradients[1][0], "dk of the unpaired key")
    judge.assert_zero(gradients[2][0], "dv of the unpaired key")
    assert all(g.isfinite().all() for g in gradients)
    # v = dout = 1 rows: the weights of every row sum to 1, so dv sums to the number of rows.
    total = gradients[2].double().sum(0)
    assert torch.allclose(total, torch.full_like(total, 1023), rtol=5e-3)


@runs_on("forward", "backward")
def test_pytorch_41508(target):
    """One row without keys in a batch: all other gradients as if it were not there."""
    embed = randn(target, 2, 4, 2, 16)
    weight = (0.25 * randn(target, 16, 16)).requires_grad_()

    def gradient(embed, used):
        x = embed @ weight
        out, _ = dense(x, x, x, seqused_k=used, deterministic=True)
        return torch.autograd.grad(out.sum(), weight)[0]

    with_it = gradient(embed, int32([4, 0], target.device))
    without = gradient(embed[:1], int32([4], target.device))
    assert with_it.isfinite().all()
    # The product with `weight` is torch's, over twice the rows: equal to rounding.
    eps = torch.finfo(target.dtype).eps
    assert judge.max_error(with_it, without.cpu()) <= 4 * eps * judge.largest(without)


@runs_on("combine")
def test_flash_attention_pr_1155_guard_bands(target):
    """What lies around `out` is untouched, rows without keys included."""
    outs = randn(target, 2, 2, 1, 64)
    lses = torch.tensor([[[NEG_INF, 0.5]], [[NEG_INF, 1.5]]], dtype=accumulate(target))
    guarded = Guarded(torch.full((2, 1, 64), NAN).to(target.dtype), target.device)
    neginf.flash_attn_combine(outs, lses.to(target.device), out=guarded.view)
    guarded.assert_guard_unchanged("out")
    judge.assert_zero(guarded.view[0], "row without keys")
    assert guarded.view[1].isfinite().all()
