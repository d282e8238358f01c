"""Merging attention states: what was attended to in parts, put back together exactly.

A state is (out, lse) over some keys. States over disjoint keys form a commutative monoid whose
identity is (0, -inf), so parts may be empty, in any number and any order.
"""

import torch

from neginf import ops


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
            (float64 with float64), natural logarithm.

    Returns:
        (out, lse) of the shapes and dtypes of the states. Differentiable in every out and lse.

    Raises:
        ValueError: no state at all, sequences of different length, shapes or devices that differ.
        TypeError: something that is no tensor, or a dtype that is not accepted.
        What is wrong with the states as such is said of ``out_partial`` and ``lse_partial``, which
        are the outs and lses stacked.
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
            _check_same_kind(f"{name}[{i}]", tensor, f"{name}[0]", tensors[0])
    return ops.combine(torch.stack(outs), torch.stack(lses), None)


def _check_same_kind(name, tensor, first_name, first):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}; accepted is a tensor")
    for what, error in (("shape", ValueError), ("device", ValueError), ("dtype", TypeError)):
        got, accepted = getattr(tensor, what), getattr(first, what)
        if got != accepted:
            raise error(f"{name}: got {what} {got}; accepted is that of {first_name}, {accepted}")
