"""Numerical differentiation of out and lse in float64 on the CPU."""

import pytest
import torch
from torch.autograd import gradcheck

import neginf
from problems import Inputs, Problem

NEG_INF = float("-inf")

BASE = Problem(lengths_q=(4,), lengths_k=(5,), head_dim=3)
PROBLEMS = {
    "plain": BASE,
    "causal": BASE.with_(causal=True),
    "empty_rows": BASE.with_(lengths_q=(6,), lengths_k=(3,), causal=True),
    "no_keys": BASE.with_(lengths_k=(0,)),
    "no_keys_sink": BASE.with_(lengths_k=(0,), sink=(0.5, -1.0)),
    "empty_rows_sink": BASE.with_(lengths_q=(6,), lengths_k=(3,), causal=True, sink=(0.5, -1.0)),
    "window": BASE.with_(window_size=(1, 1)),
    "sink": BASE.with_(sink=(0.5, -1.0)),
    "softcap": BASE.with_(softcap=0.7, softmax_scale=1.0),
    "alibi": BASE.with_(alibi="h"),
    "alibi_batch": BASE.with_(lengths_q=(4,) * 2, lengths_k=(5,) * 2, alibi="bh", causal=True),
    "gqa": BASE.with_(heads=4, heads_k=2),
    "narrower_values": BASE.with_(head_dim_v=2, causal=True),
    "mha": BASE.with_(heads=2, heads_k=2),
    "splits": BASE.with_(num_splits=3),
    "scale": BASE.with_(softmax_scale=0.3),
    "seqused": BASE.with_(lengths_q=(4,) * 2, lengths_k=(5,) * 2, used_q=(4, 2), used_k=(0, 3)),
    "varlen": BASE.with_(
        varlen=True, lengths_q=(3, 0, 2), lengths_k=(2, 4, 0), extra_q=1, extra_k=1
    ),
    "everything": BASE.with_(
        varlen=True, lengths_q=(5, 2), lengths_k=(3, 4), heads=4, heads_k=2, causal=True,
        window_size=(2, 0), softcap=1.5, alibi="bh", sink=(0.5, -1.0, 2.0, 0.0), num_splits=2,
    ),
}  # fmt: skip


def finite(out, lse):
    """gradcheck differentiates numbers: -inf of empty rows is constant, so 0 stands for it."""
    return out, torch.where(lse == NEG_INF, 0, lse)


@pytest.mark.parametrize("name", PROBLEMS)
def test_attention(name):
    problem = PROBLEMS[name]
    inputs = Inputs(problem, torch.float64, poison=False)
    leaves = {n: inputs.tensor(n).clone().requires_grad_() for n in "qkv"}
    if problem.sink is not None:
        leaves["sink"] = inputs.options["sink"].clone().requires_grad_()

    def function(*tensors):
        return finite(*inputs.call(**dict(zip(leaves, tensors, strict=True))))

    assert gradcheck(function, tuple(leaves.values()))


@pytest.mark.parametrize("which", ["none_empty", "some_empty", "rows_empty"])
@pytest.mark.parametrize("lead", [(2, 3), (3,)], ids=str)
def test_combine(which, lead):
    out = torch.randn(3, *lead, 2, 4, dtype=torch.float64)
    lse = torch.randn(3, *lead[:-1], 2, lead[-1], dtype=torch.float64)
    empty = torch.zeros(lse.shape, dtype=torch.bool)
    if which != "none_empty":
        empty[0, ..., 0] = empty[2, ..., 1] = True
    if which == "rows_empty":
        empty[:, ..., 2] = True

    def function(out, lse):
        return finite(*neginf.flash_attn_combine(out, torch.where(empty, NEG_INF, lse)))

    assert gradcheck(function, (out.requires_grad_(), lse.requires_grad_()))


def test_merge_states():
    outs = [torch.randn(2, 3, 2, 4, dtype=torch.float64).requires_grad_() for _ in range(3)]
    lses = [torch.randn(2, 2, 3, dtype=torch.float64).requires_grad_() for _ in range(3)]
    assert gradcheck(lambda *t: neginf.merge_states(t[:3], t[3:]), (*outs, *lses))


def test_attention_then_merge():
    """Two shards, merged: the gradient goes through both lse."""
    q, k, v = (torch.randn(1, n, 2, 3, dtype=torch.float64).requires_grad_() for n in (4, 5, 5))

    def function(q, k, v):
        left = neginf.flash_attn_func(q, k[:, :2], v[:, :2], window_size=(-1, 3), return_lse=True)
        right = neginf.flash_attn_func(q, k[:, 2:], v[:, 2:], causal=True, return_lse=True)
        return neginf.merge_states(*zip(left, right, strict=True))

    assert gradcheck(function, (q, k, v))
