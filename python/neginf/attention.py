"""Attention over dense and packed sequences, with FlashAttention-2's names and order."""

import torch

from neginf import ops
from neginf._checks import check_ints, check_tensors


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    sink=None,
    return_lse=False,
    num_splits=0,
    seqused_q=None,
    seqused_k=None,
):
    """Attention of q over k and v: ``softmax(q k^T * softmax_scale) v``, and its log-sum-exp.

    A row that sees no key (by mask, window, causal with seqlen_q > seqlen_k, seqused_k = 0 or
    seqlen_k = 0) gives ``out = 0`` and ``lse = -inf``, and zero gradients (rule P1). A visible
    score that is NaN or +inf gives NaN in both (P3). Memory that no visible key owns is never
    used (P5); rows from ``seqused_q`` on give ``out = 0`` and ``lse = -inf`` (P6).

    Masks are aligned to the bottom-right corner: row i sees key j iff
    ``i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right``.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), float16 or bfloat16, on the CPU also float32 and
            float64; head_dim up to 256. The last dimension is copied if it is not contiguous.
        k: (batch, seqlen_k, num_heads_k, head_dim), dtype of q. num_heads_k divides num_heads:
            query head h reads key head ``h // (num_heads // num_heads_k)``.
        v: (batch, seqlen_k, num_heads_k, head_dim_v), dtype of q; head_dim_v up to head_dim.
        dropout_p: 0.0; anything else is not implemented.
        softmax_scale: above 0; None is ``1 / sqrt(head_dim)``.
        causal: row i sees no key after its diagonal; the same as ``window_size[1] = 0``.
        window_size: (left, right) in keys; -1 is unbounded.
        softcap: ``softcap * tanh(score / softcap)`` before the mask; 0.0 is none.
        alibi_slopes: (num_heads) or (batch, num_heads), float32 (float64 for float64 q). Adds
            ``-slope * |i + seqlen_k - seqlen_q - j|``. Has no gradient.
        deterministic: the backward gives the same bits on every run.
        return_attn_probs: return ``(out, lse, None)`` as flash-attn does; probabilities are never
            materialised.
        sink: (num_heads), float32 (float64 for float64 q) or dtype of q. One more key per row with
            this score and a value of zero: ``lse`` includes it, and a row without keys has
            ``out = 0``, ``lse = sink``.
        return_lse: return ``(out, lse)``.
        num_splits: number of shares the keys are split into, up to 256; 0 is automatic. Changes
            nothing but rounding and how far a NaN in v reaches (P3).
        seqused_q: (batch) int32, number of rows of each sequence that are in use.
        seqused_k: (batch) int32, number of keys of each sequence that are in use.

    Returns:
        out, (batch, seqlen_q, num_heads, head_dim_v), dtype of q; with ``return_lse`` or
        ``return_attn_probs`` also lse, (batch, num_heads, seqlen_q), natural logarithm, float32
        (float64 for float64 q), differentiable like out.

    Raises:
        ValueError: a shape, device or value that is not accepted; the message names the argument.
        TypeError: a dtype that is not accepted, something that is no tensor, or a window that is
            not of ints.
        NotImplementedError: dropout, or no kernel in this build for these tensors.

    Source: Dao, FlashAttention-2 (2023); for rows without keys, rules P1 to P6 of docs/contract.md.
    """
    _reject_dropout(dropout_p)
    window_left, window_right = window_sides(window_size)
    out, lse = call_operator(
        ops.forward,
        q, k, v, None, None, seqused_q, seqused_k, None, None,
        softmax_scale, causal, window_left, window_right, softcap,
        alibi_slopes, sink, num_splits, deterministic,
    )  # fmt: skip
    return _results(out, lse, return_attn_probs, return_lse)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    *,
    sink=None,
    return_lse=False,
    num_splits=0,
    seqused_q=None,
    seqused_k=None,
):
    """Attention over sequences packed one after the other. Everything not listed here is as in
    :func:`flash_attn_func`, with seqlen_q and seqlen_k each sequence's own.

    Rows that belong to no sequence (from ``cu_seqlens_q[-1]`` on, or past ``seqused_q``) give
    ``out = 0`` and ``lse = -inf``, and zero gradients (P6).

    Args:
        q: (total_q, num_heads, head_dim).
        k: (total_k, num_heads_k, head_dim); with a block_table (num_pages, page_size, num_heads_k,
            head_dim).
        v: as k, of head_dim_v.
        cu_seqlens_q: (batch + 1) int32; sequence b has the rows ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]``. Starts at 0, never falls, ends at or before total_q: checked
            for CPU tensors; on the GPU values are clamped on the device, without synchronising.
        cu_seqlens_k: likewise for k and v. With a block_table only the differences count, and they
            may be None if seqused_k is given.
        max_seqlen_q: an upper bound of the sequences' lengths.
        max_seqlen_k: likewise for k and v; not used with a block_table.
        block_table: (batch, pages of a sequence) int32: key j of sequence b is row
            ``j % page_size`` of page ``block_table[b, j // page_size]`` of k and v. This is
            :func:`neginf.flash_attn_with_kvcache` without new keys, and errors call k, v and
            block_table by its names. There is no gradient.
        seqused_q: (batch) int32, number of rows in use, counted from each sequence's start. Not
            with a block_table.
        seqused_k: likewise for k and v; with a block_table in place of cu_seqlens_k.

    Returns:
        out, (total_q, num_heads, head_dim_v), dtype of q; with ``return_lse`` or
        ``return_attn_probs`` also lse, (num_heads, total_q), natural logarithm.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`flash_attn_func`.
        NotImplementedError: with a block_table also seqused_q, or a q, k or v that needs a
            gradient.
    """
    _reject_dropout(dropout_p)
    window_left, window_right = window_sides(window_size)
    options = (softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, sink)
    if block_table is None:
        out, lse = call_operator(
            ops.forward,
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
            *options, num_splits, deterministic,
        )  # fmt: skip
    else:
        _check_paged(q, k, v, cu_seqlens_q, seqused_q)
        lengths = _lengths(cu_seqlens_q, cu_seqlens_k, seqused_k)
        out, lse = call_operator(
            ops.decode,
            q, k, v, lengths, block_table, None, None, cu_seqlens_q, max_seqlen_q,
            *options, num_splits, 0,
        )  # fmt: skip
    return _results(out, lse, return_attn_probs, return_lse)


def _check_paged(q, k, v, cu_seqlens_q, seqused_q):
    """What pages exclude."""
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        raise NotImplementedError(
            "block_table: got a tensor together with a q, k or v that needs a gradient; accepted "
            "are tensors without, or a call under torch.no_grad()"
        )
    if seqused_q is not None:
        raise NotImplementedError(
            "seqused_q: got a tensor together with block_table; accepted is None"
        )


def _lengths(cu_seqlens_q, cu_seqlens_k, seqused_k):
    """Those of the keys, (batch) int32, under their own names checked as the operator would."""
    name, given, size = "seqused_k", seqused_k, cu_seqlens_q.numel() - 1
    if seqused_k is None:
        name, given, size = "cu_seqlens_k", cu_seqlens_k, size + 1
    if given is None:
        raise ValueError(
            "cu_seqlens_k, seqused_k: got None together with block_table; accepted is one of them"
        )
    check_tensors(**{name: given})
    if given.dtype != torch.int32:
        raise TypeError(f"{name}: got dtype {given.dtype}; accepted is torch.int32")
    if given.shape != (size,):
        raise ValueError(f"{name}: got shape {tuple(given.shape)}; accepted is ({size},)")
    return given if seqused_k is not None else given.diff()


def call_operator(operator, *arguments):
    try:
        return operator(*arguments)
    except RuntimeError:
        # By which torch refuses what is no tensor. Asked only now, this costs good calls no time.
        for argument, value in zip(operator._schema.arguments, arguments, strict=True):
            if str(argument.type) == "Tensor" or (
                str(argument.type) == "Optional[Tensor]" and value is not None
            ):
                check_tensors(**{argument.name: value})
        raise


def _reject_dropout(dropout_p):
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p: got {dropout_p}; accepted is 0.0, dropout is not implemented"
        )


def window_sides(window_size):
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size: got {window_size}; accepted is (left, right)") from None
    sides = check_ints("window_size", window_size, (left, right), "(left, right), two ints")
    # Into what the operator takes: a window of more keys than that is as wide as all of them.
    return [max(-(2**63), min(side, 2**63 - 1)) for side in sides]


def _results(out, lse, return_attn_probs, return_lse):
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out
