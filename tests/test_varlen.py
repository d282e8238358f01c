"""Packed sequences: gaps, zero lengths, seqused, rows of no sequence, and agreement with dense."""

import pytest
import torch

import judge
import neginf
from problems import Guarded, Inputs, Problem, check_forward, check_gradients, int32
from targets import runs_on

NEG_INF = float("-inf")

PACKINGS = {
    "equal": {"lengths_q": (64, 64), "lengths_k": (64, 64)},
    "ragged": {"lengths_q": (1, 77, 130, 5), "lengths_k": (9, 70, 129, 66)},
    "zero_lengths": {"lengths_q": (0, 5, 0, 3, 0), "lengths_k": (4, 0, 0, 6, 2)},
    "all_keys_empty": {"lengths_q": (3, 70), "lengths_k": (0, 0)},
    "all_queries_empty": {"lengths_q": (0, 0), "lengths_k": (3, 70)},
    "nothing": {"lengths_q": (0, 0), "lengths_k": (0, 0)},
    "batch_0": {"lengths_q": (), "lengths_k": (), "extra_q": 4, "extra_k": 3},
    "extra_rows": {"lengths_q": (5, 66), "lengths_k": (70, 3), "extra_q": 70, "extra_k": 5},
    "slack": {"lengths_q": (5, 66), "lengths_k": (70, 3), "slack": 500},
    "seqused": {
        "lengths_q": (5, 66, 9), "lengths_k": (70, 30, 8),
        "used_q": (5, 60, 0), "used_k": (0, 13, 8),
    },
}  # fmt: skip
SWITCHES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (4, 1)},
    "narrower_values": {"head_dim": 40, "head_dim_v": 24, "causal": True},
    "everything": {
        "causal": True, "softcap": 5.0, "alibi": "bh", "sink": (0.5, NEG_INF, -1.0, 2.0)
    },
}  # fmt: skip


def packed(packing, switches):
    return Problem(varlen=True, heads=4, heads_k=2, **PACKINGS[packing], **SWITCHES[switches])


@runs_on("forward")
@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_forward(target, packing, switches):
    check_forward(Inputs(packed(packing, switches), target.dtype, target.device))


@runs_on("forward", "backward")
@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_backward(target, packing, switches):
    check_gradients(Inputs(packed(packing, switches), target.dtype, target.device))


@runs_on("forward")
def test_equals_dense_of_each_sequence(target):
    """To rounding in values, exactly in the positions of -inf."""
    inputs = Inputs(packed("ragged", "causal"), target.dtype, target.device, poison=False)
    out, lse = inputs.forward()
    begin_q = begin_k = 0
    ragged = PACKINGS["ragged"]
    for length_q, length_k in zip(ragged["lengths_q"], ragged["lengths_k"], strict=True):
        rows, keys = slice(begin_q, begin_q + length_q), slice(begin_k, begin_k + length_k)
        one_out, one_lse = neginf.flash_attn_func(
            inputs.tensor("q")[None, rows],
            inputs.tensor("k")[None, keys],
            inputs.tensor("v")[None, keys],
            causal=True,
            return_lse=True,
        )
        judge.assert_special_positions_equal(lse[:, rows], one_lse[0], "lse")
        eps = torch.finfo(lse.dtype).eps
        assert judge.max_error(lse[:, rows], one_lse[0].cpu()) <= 32 * eps
        eps = torch.finfo(out.dtype).eps
        assert judge.max_error(out[rows], one_out[0].cpu()) <= 32 * eps
        begin_q, begin_k = rows.stop, keys.stop


@runs_on("forward")
def test_lse_layout(target):
    inputs = Inputs(packed("extra_rows", "full"), target.dtype, target.device)
    out, lse = inputs.forward()
    assert lse.shape == (4, 5 + 66 + 70)
    assert lse.is_contiguous()
    judge.assert_state((out[71:], lse[:, 71:]), 0, NEG_INF, "rows of no sequence")


@runs_on("forward")
def test_rows_of_no_sequence_ignore_the_sink(target):
    problem = packed("seqused", "everything").with_(extra_q=3)
    inputs = Inputs(problem, target.dtype, target.device)
    out, lse = check_forward(inputs)
    belongs = torch.zeros(out.shape[0], dtype=torch.bool)
    belongs[0:5] = belongs[5:65] = True
    judge.assert_state((out.cpu()[~belongs], lse.cpu()[:, ~belongs]), 0, NEG_INF)
    # Sequence 0 has no keys: its rows have the sink, where it is finite.
    for head, sink in enumerate(problem.sink):
        assert (lse[head, :5] == sink).all()


@runs_on("forward", "backward")
def test_dense_with_seqused(target):
    for causal in (False, True):
        problem = Problem(
            lengths_q=(70,) * 3, lengths_k=(80,) * 3, used_q=(70, 0, 33), used_k=(0, 80, 20),
            causal=causal, sink=(0.5, NEG_INF),
        )  # fmt: skip
        inputs = Inputs(problem, target.dtype, target.device)
        check_gradients(inputs)
        out, lse = inputs.forward()
        judge.assert_state((out[1], lse[1]), 0, NEG_INF, "seqused_q = 0")
        judge.assert_state((out[2, 33:], lse[2, :, 33:]), 0, NEG_INF, "past seqused_q")
        judge.assert_state((out[0], lse[0, 1]), 0, NEG_INF, "seqused_k = 0, no sink")
        assert (lse[0, 0] == 0.5).all()


@runs_on("forward")
def test_length_zero_of_the_whole_buffer(target):
    """total_q = 0 and total_k = 0 with a batch; cu_seqlens of one element with tokens."""
    empty = torch.empty(0, 2, 16).to(target.device, target.dtype)
    some = torch.full((3, 2, 16), float("nan")).to(target.device, target.dtype)
    zeros, batch_0 = int32([0, 0, 0], target.device), int32([0], target.device)
    for q, k, cu in [
        (empty, empty, zeros),
        (some, empty, zeros),
        (empty, some, zeros),
        (some, some, batch_0),
    ]:
        out, lse = neginf.flash_attn_varlen_func(q, k, k, cu, cu, 0, 0, return_lse=True)
        assert out.shape == q.shape
        assert lse.shape == (2, q.shape[0])
        judge.assert_state((out, lse), 0, NEG_INF)


@runs_on("forward")
def test_same_buffer_for_k_and_v_and_strides(target):
    """Packed qkv (total, 3, heads, d), its views unpadded and in a guarded buffer."""
    cu = int32([0, 5, 12], target.device)
    qkv = torch.randn(12, 3, 2, 16).to(target.device, target.dtype)
    q, k, v = qkv.unbind(1)
    expected = neginf.flash_attn_varlen_func(
        *(t.contiguous() for t in (q, k, v)), cu, cu, 7, 7, causal=True, return_lse=True
    )
    guarded = [Guarded(t.cpu(), target.device, 5) for t in (q, k, v)]
    for tensors in ((q, k, v), [g.view for g in guarded]):
        out, lse = neginf.flash_attn_varlen_func(
            *tensors, cu, cu, 7, 7, causal=True, return_lse=True
        )
        judge.assert_bits_equal(out, expected[0], "out")
        judge.assert_bits_equal(lse, expected[1], "lse")


@runs_on("forward", dtypes=("bfloat16",), gpu_only=True)
def test_garbage_lengths_on_the_gpu_stay_inside(target):
    """Unchecked values are clamped on the device: nothing is read or written outside."""
    q = torch.randn(9, 2, 16).to(target.device, target.dtype)
    for values in ([0, 2**30, 5], [0, -7, 9], [3, 9, 2**31 - 1], [0, 5, 3], [-(2**31), 0, 4]):
        cu = int32(values, target.device)
        used = int32([values[1], values[2]], target.device)
        out, lse = neginf.flash_attn_varlen_func(
            q, q, q, cu, cu, 9, 9, seqused_k=used, return_lse=True
        )
        torch.cuda.synchronize()
        assert not out.isnan().any()
        assert (lse.isfinite() | lse.isneginf()).all()
