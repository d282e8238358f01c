"""Merging attention states: what was attended to in parts, put back together exactly.

A state is (out, lse) over some keys. States over disjoint keys form a commutative monoid whose
identity is (0, -inf), so parts may be empty, in any number and any order.
"""

import torch

from neginf import ops
from neginf._checks import check_no_gradient, check_same_kind, check_state

NEG_INF = float("-inf")


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Merges the states of all splits into one.

        L = ln sum_s exp(L_s)        O = sum_s exp(L_s - L) O_s

    A split with ``lse = -inf`` is left out by selection: whatever its payload holds, NaN included,
    does not matter. All splits empty, or no split at all, gives (0, -inf). A NaN lse, or a NaN
    payload with a finite lse, makes the merged row NaN (contract section 5). Differentiable in both
    arguments.

    The arguments are those of FlashAttention-3's function of this name, but lse has the layout of
    this library: FlashAttention-3's (splits, batch, seqlen, heads) must be transposed.

    Args:
        out_partial: (splits, batch, seqlen, heads, head_dim) or (splits, total, heads, head_dim),
            float32, float16 or bfloat16, on the CPU also float64; any strides.
        lse_partial: (splits, batch, heads, seqlen) or (splits, heads, total), float32 (float64 with
            float64), natural logarithm; any strides.
        out: where to write; shaped as out_partial without splits, last stride 1, in memory of its
            own. Not differentiable.
        out_dtype: dtype of a new out; None is the dtype of out_partial.

    Returns:
        out and lse, shaped as the partials without splits.

    Raises:
        ValueError: shapes or devices that do not fit; both out and another out_dtype given; on the
            CPU also +inf in lse_partial, by which other libraries mark empty rows. On the GPU
            values are not checked and +inf gives NaN.
        TypeError: a dtype that is not accepted.
    """
    if out is None:
        return ops.combine(out_partial, lse_partial, out_dtype)
    if out_dtype is not None and out_dtype != out.dtype:
        raise ValueError(
            f"out_dtype: got {out_dtype}; accepted is None or the dtype of out, {out.dtype}"
        )
    return out, ops.combine_out(out_partial, lse_partial, out)


def merge_states(outs, lses):
    """Merges a sequence of states over disjoint keys into one; see :func:`flash_attn_combine`.

    Args:
        outs: sequence of (batch, seqlen, heads, head_dim) or (total, heads, head_dim) tensors of
            one shape and dtype; any strides.
        lses: sequence, as long, of (batch, heads, seqlen) or (heads, total) tensors, float32
            (float64 with float64), natural logarithm; any strides.

    Returns:
        (out, lse) of the shapes and dtypes of the states. Differentiable in every out and lse.
        States are read where they are, and copied only where the last dimension of an out is
        strided. More than 16 are merged by sixteens, whose results are float32 (float64).

    Raises:
        ValueError: no state at all, sequences of different length, shapes or devices that differ.
        TypeError: something that is no tensor, or a dtype that is not accepted.
    """
    outs, lses = list(outs), list(lses)
    if not outs:
        raise ValueError("outs: got an empty sequence; accepted is one state or more")
    if len(outs) != len(lses):
        raise ValueError(
            f"lses: got {len(lses)} tensors; accepted is one for each of the {len(outs)} outs"
        )
    for name, tensors in (("outs", outs), ("lses", lses)):
        for i, tensor in enumerate(tensors):
            check_same_kind(f"{name}[{i}]", tensor, f"{name}[0]", tensors[0])
    return ops.merge(outs, lses, None)


def merge_state(out_a, lse_a, out_b, lse_b):
    """Merges two states over disjoint keys; :func:`merge_states` of a pair.

    Args:
        out_a, out_b: (batch, seqlen, heads, head_dim) or (total, heads, head_dim), one shape and
            dtype; any strides.
        lse_a, lse_b: (batch, heads, seqlen) or (heads, total), float32 (float64 with float64),
            natural logarithm. For FlashInfer's (tokens, heads) in base 2 there is
            :func:`neginf.compat.flashinfer.merge_state`.

    Returns:
        (out, lse) of the shapes and dtypes of the states. Differentiable in all four arguments.

    Raises:
        ValueError, TypeError: as :func:`merge_states`, whose ``outs`` are out_a and out_b.
    """
    return merge_states([out_a, out_b], [lse_a, lse_b])


def merge_state_in_place(out, lse, out_other, lse_other, mask=None):
    """Merges the state (out_other, lse_other) into (out, lse), which is overwritten.

    Args:
        out: (batch, seqlen, heads, head_dim) or (total, heads, head_dim).
        lse: (batch, heads, seqlen) or (heads, total), natural logarithm.
        out_other, lse_other: shaped and typed as out and lse.
        mask: (batch, seqlen) or (total) bool: rows that are merged. The others keep every bit, and
            nothing of their other state is used. None is all rows.

    Raises:
        ValueError: a mask of another shape or device; tensors that need a gradient while gradients
            are recorded, since what is overwritten has none: use :func:`merge_state`. Otherwise as
            :func:`merge_states`.
        TypeError: a mask that is not bool; otherwise as :func:`merge_states`.
    """
    check_state(out, lse)
    check_same_kind("out_other", out_other, "out", out)
    check_same_kind("lse_other", lse_other, "lse", lse)
    check_no_gradient(out=out, lse=lse, out_other=out_other, lse_other=lse_other)
    if mask is None:
        merged_out, merged_lse = merge_state(out, lse, out_other, lse_other)
    else:
        _check_mask(mask, out)
        mask_of_lse = mask.unsqueeze(-2)
        lse_other = torch.where(mask_of_lse, lse_other, NEG_INF)
        merged_out, merged_lse = merge_state(out, lse, out_other, lse_other)
        merged_out = torch.where(mask[..., None, None], merged_out, out)
        merged_lse = torch.where(mask_of_lse, merged_lse, lse)
    out.copy_(merged_out)
    lse.copy_(merged_lse)


def apply_sink(out, lse, sink):
    """Merges a learnable sink into a state: one more key of score ``sink`` with a value of zero.

    For states computed without the ``sink`` argument of the attention functions, as when keys are
    sharded: the sink must count once, so it is merged once, at the end (contract section 4). A row
    without keys becomes ``out = 0, lse = sink``.

    Args:
        out: (batch, seqlen, heads, head_dim) or (total, heads, head_dim).
        lse: (batch, heads, seqlen) or (heads, total), float32 (float64 with float64), natural
            logarithm.
        sink: (heads), of any floating dtype; -inf is no sink and gets gradient 0.

    Returns:
        (out, lse). Differentiable in out, lse and sink.

    Raises:
        ValueError: a sink of another shape or device.
        TypeError: a sink that is no floating-point tensor.
        What is wrong with the state, or +inf in the sink, is said as in :func:`merge_states`.
    """
    check_state(out, lse)
    check_sink(sink, out)
    sink_lse = sink.to(lse.dtype).unsqueeze(-1).expand_as(lse)
    return merge_state(out, lse, torch.zeros_like(out), sink_lse)


def check_sink(sink, out):
    if not isinstance(sink, torch.Tensor) or not sink.is_floating_point():
        got = sink.dtype if isinstance(sink, torch.Tensor) else type(sink).__name__
        raise TypeError(f"sink: got {got}; accepted is a floating-point tensor")
    if sink.shape != out.shape[-2:-1] or sink.device != out.device:
        raise ValueError(
            f"sink: got shape {tuple(sink.shape)} on {sink.device}; accepted is "
            f"{tuple(out.shape[-2:-1])} on {out.device}"
        )


def _check_mask(mask, out):
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"mask: got {got}; accepted is a tensor of bool")
    if mask.shape != out.shape[:-2] or mask.device != out.device:
        raise ValueError(
            f"mask: got shape {tuple(mask.shape)} on {mask.device}; accepted is "
            f"{tuple(out.shape[:-2])} on {out.device}"
        )
