"""num_splits changes nothing but rounding, and the positions of -inf and NaN not at all."""

import pytest
import torch

import judge
import neginf
from problems import Inputs, Problem, check_gradients, check_state
from targets import runs_on

NEG_INF = float("-inf")
NAN = float("nan")
SPLITS = (1, 2, 3, 7, 256, 0)

PROBLEMS = {
    "decode": Problem(lengths_q=(1,) * 2, lengths_k=(700,) * 2, heads=4, heads_k=2, head_dim=64),
    "one_key": Problem(lengths_q=(3,), lengths_k=(1,), head_dim=64),
    "no_key": Problem(lengths_q=(3,), lengths_k=(0,), head_dim=64),
    "no_key_sink": Problem(lengths_q=(3,), lengths_k=(0,), head_dim=64, sink=(0.5, NEG_INF)),
    "causal": Problem(lengths_q=(150,), lengths_k=(300,), head_dim=64, causal=True),
    "causal_empty_rows": Problem(lengths_q=(300,), lengths_k=(150,), head_dim=64, causal=True),
    "window": Problem(lengths_q=(150,), lengths_k=(300,), head_dim=64, window_size=(20, 3)),
    "sink": Problem(lengths_q=(5,), lengths_k=(300,), head_dim=64, sink=(2.0, NEG_INF)),
    "softcap_alibi": Problem(
        lengths_q=(5,) * 2, lengths_k=(300,) * 2, head_dim=64, softcap=3.0, alibi="bh"
    ),
    "seqused": Problem(
        lengths_q=(5,) * 4, lengths_k=(300,) * 4, head_dim=64, used_k=(0, 1, 130, 300), causal=True
    ),
    "varlen": Problem(
        lengths_q=(3, 0, 5, 2), lengths_k=(300, 4, 0, 1), extra_q=3, extra_k=2, slack=40,
        head_dim=64, varlen=True, causal=True, sink=(1.0, -1.0),
    ),
    "batch_0": Problem(lengths_q=(), lengths_k=(), head_dim=64),
    "head_dim_59": Problem(lengths_q=(5,), lengths_k=(300,), head_dim=59),
    "narrower_values": Problem(lengths_q=(5,), lengths_k=(300,), head_dim=64, head_dim_v=40),
}  # fmt: skip


@runs_on("forward", "combine")
@pytest.mark.parametrize("name", PROBLEMS)
def test_splits(target, name):
    inputs = Inputs(PROBLEMS[name], target.dtype, target.device)
    whole = inputs.forward(num_splits=1)
    for splits in SPLITS:
        out, lse = inputs.forward(num_splits=splits)
        check_state(inputs, out, lse)
        judge.assert_special_positions_equal(out, whole[0], f"out, {splits} splits")
        judge.assert_special_positions_equal(lse, whole[1], f"lse, {splits} splits")
        accumulate = 1e-13 if target.dtype == torch.float64 else 1e-6
        size = judge.largest(whole[0].cpu())
        slack = (2 * torch.finfo(target.dtype).eps + 8 * accumulate) * size
        assert judge.max_error(out, whole[0].cpu()) <= slack
        assert judge.max_error(lse, whole[1].cpu()) <= accumulate * inputs.score_size()


@runs_on("forward", "combine")
@pytest.mark.parametrize("score", [-46340.95, 46340.95, 1.4e11, -1.4e11])
def test_weights_sum_to_one_however_large_the_scores(target, score):
    """L of 1.4e11 has no room for ln 2: the weights of the splits must still add up to 1."""
    q = torch.zeros(1, 2, 1, 16).to(target.device, target.dtype)
    k, v = torch.zeros(1, 2000, 1, 16).to(q), torch.full((1, 2000, 1, 16), 3.0).to(q)
    q[..., 0], k[..., 0] = 1, 1 if score > 0 else -1
    for splits in SPLITS:
        out, lse = neginf.flash_attn_func(
            q, k, v, softmax_scale=abs(score), num_splits=splits, return_lse=True
        )
        assert lse.cpu().double().sub(score).abs().max() <= 8 + 1e-7 * abs(score)
        error = (out.double() - 3).abs().max().item()
        assert error <= 4 * torch.finfo(target.dtype).eps + 1e-6, f"{splits} splits"


@runs_on("forward", "combine")
@pytest.mark.parametrize("poisoned_key", [0, 1000, 1099])
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_nan_does_not_depend_on_splits(target, poisoned_key, value):
    """Whichever split meets it, NaN is neither dropped nor called empty."""
    problem = Problem(lengths_q=(200,), lengths_k=(1100,), head_dim=64, causal=True)
    inputs = Inputs(problem, target.dtype, target.device)
    q, k, v = (inputs.tensor(n).clone() for n in "qkv")
    q.abs_()
    k[:, poisoned_key] = value
    expected = (torch.arange(200) + 900 >= poisoned_key).expand(1, 2, 200)
    for splits in SPLITS:
        out, lse = inputs.call(q, k, v, num_splits=splits)
        assert torch.equal(lse.isnan().cpu(), expected), f"{splits} splits"
        assert torch.equal(out.isnan().cpu(), expected.mT[..., None].expand(out.shape))
        assert lse.cpu()[~expected].isfinite().all()


@runs_on("forward", "backward", "combine")
@pytest.mark.parametrize("splits", [2, 7, 256])
def test_gradients(target, splits):
    for name in ("causal_empty_rows", "no_key_sink", "varlen", "softcap_alibi"):
        check_gradients(
            Inputs(PROBLEMS[name].with_(num_splits=splits), target.dtype, target.device)
        )
