"""FlashAttention-2's functions: the public ones, and the private ones that ring attention calls.

    import sys, neginf.compat.flash_attn
    sys.modules["flash_attn"] = sys.modules["flash_attn.flash_attn_interface"] = (
        neginf.compat.flash_attn
    )

makes ``from flash_attn import flash_attn_func`` and ``from flash_attn.flash_attn_interface import
_flash_attn_forward`` find these. The softmax_lse that they return holds -inf where
FlashAttention-2 has +inf, in rows without keys, and NaN where it has +inf beside a NaN in out;
:func:`neginf.convert.to_fa2` puts +inf back. Dropout is not implemented.
"""

import torch

from neginf import ops
from neginf._checks import check_tensors
from neginf.attention import _reject_dropout, flash_attn_func, flash_attn_varlen_func
from neginf.kvcache import flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """:func:`neginf.flash_attn_func` of q, k and v in one tensor.

    Args:
        qkv: (batch, seqlen, 3, num_heads, head_dim).
        The others are those of :func:`neginf.flash_attn_func`.

    Returns:
        out, (batch, seqlen, num_heads, head_dim); with return_attn_probs (out, lse, None).

    Raises:
        ValueError: qkv of another shape. Otherwise as :func:`neginf.flash_attn_func`.
    """
    return flash_attn_func(
        *_unpacked("qkv", qkv, 5, 3), dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """:func:`neginf.flash_attn_func` of k and v in one tensor.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        kv: (batch, seqlen_k, 2, num_heads_k, head_dim).
        The others are those of :func:`neginf.flash_attn_func`.

    Returns:
        out, shaped as q; with return_attn_probs (out, lse, None).

    Raises:
        ValueError: kv of another shape. Otherwise as :func:`neginf.flash_attn_func`.
    """
    return flash_attn_func(
        q, *_unpacked("kv", kv, 5, 2), dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """:func:`neginf.flash_attn_varlen_func` of q, k and v in one tensor.

    Args:
        qkv: (total, 3, num_heads, head_dim).
        cu_seqlens, max_seqlen: of q and of k.
        The others are those of :func:`neginf.flash_attn_varlen_func`.

    Returns:
        out, (total, num_heads, head_dim); with return_attn_probs (out, lse, None).

    Raises:
        ValueError: qkv of another shape. Otherwise as :func:`neginf.flash_attn_varlen_func`.
    """
    return flash_attn_varlen_func(
        *_unpacked("qkv", qkv, 4, 3), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
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
):
    """:func:`neginf.flash_attn_varlen_func` of k and v in one tensor.

    Args:
        q: (total_q, num_heads, head_dim).
        kv: (total_k, 2, num_heads_k, head_dim).
        The others are those of :func:`neginf.flash_attn_varlen_func`.

    Returns:
        out, shaped as q; with return_attn_probs (out, lse, None).

    Raises:
        ValueError: kv of another shape. Otherwise as :func:`neginf.flash_attn_varlen_func`.
    """
    return flash_attn_varlen_func(
        q, *_unpacked("kv", kv, 4, 2), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


# The private functions are plain functions with every argument in their signature: ring attention
# reads names and defaults from there. Like the originals they record no gradient.


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
):
    """(out, softmax_lse, None, None): FlashAttention-2's third and fourth result, the dropped
    probabilities and the state of the random numbers, belong to dropout.

    softmax_lse: (batch, num_heads, seqlen_q), natural logarithm, -inf in rows without keys.

    Raises:
        NotImplementedError: dropout, or return_softmax. Otherwise as
            :func:`neginf.flash_attn_func`.
    """
    _reject_softmax(return_softmax)
    with torch.no_grad():
        out, lse = flash_attn_func(
            q, k, v, dropout_p, softmax_scale, causal, (window_size_left, window_size_right),
            softcap, alibi_slopes, return_lse=True,
        )  # fmt: skip
    return out, lse, None, None


def _flash_attn_varlen_forward(
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
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
):
    """(out, softmax_lse, None, None) of packed sequences, see :func:`_flash_attn_forward`.

    softmax_lse: (num_heads, total_q). zero_tensors changes nothing: every element is written.

    Raises:
        NotImplementedError: dropout, return_softmax or leftpad_k. Otherwise as
            :func:`neginf.flash_attn_varlen_func`.
    """
    _reject_softmax(return_softmax)
    if leftpad_k is not None:
        raise NotImplementedError("leftpad_k: got a tensor; accepted is None")
    with torch.no_grad():
        out, lse = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
            softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes,
            block_table=block_table, seqused_k=seqused_k, return_lse=True,
        )  # fmt: skip
    return out, lse, None, None


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    rng_state=None,
):
    """Writes the gradients of q, k and v into dq, dk and dv, where they are given.

    out and softmax_lse may be those of attention over more keys than k holds, the merge of all
    blocks: then dk and dv are the gradients of this block's keys, and the dq of all blocks add up
    to the gradient of q. (P = exp(s - L) and D = rowsum(out * dout) need L and out of the whole,
    and nothing else of the other blocks.)

    softmax_lse: (batch, num_heads, seqlen_q), natural logarithm; rows of -inf get gradient 0.

    Returns:
        None, where FlashAttention-2 returns its workspace D.

    Raises:
        ValueError: a gradient of another shape or device; on the CPU +inf in softmax_lse (convert
            it, see :func:`neginf.convert.from_fa2`). Otherwise as :func:`neginf.flash_attn_func`.
        NotImplementedError: dropout.
    """
    _backward(
        dout, q, k, v, out, softmax_lse, (dq, dk, dv), (None,) * 6, dropout_p, softmax_scale,
        causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    rng_state=None,
    zero_tensors=False,
):
    """:func:`_flash_attn_backward` of packed sequences.

    softmax_lse: (num_heads, total_q). zero_tensors changes nothing: every element is written.
    """
    packing = (cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k)
    _backward(
        dout, q, k, v, out, softmax_lse, (dq, dk, dv), packing, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    )  # fmt: skip


def _backward(
    dout, q, k, v, out, softmax_lse, buffers, packing, dropout_p, softmax_scale, causal,
    window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
):  # fmt: skip
    _reject_dropout(dropout_p)
    for name, buffer, like in zip(("dq", "dk", "dv"), buffers, (q, k, v), strict=True):
        if buffer is None:
            continue
        check_tensors(**{name: buffer})
        if buffer.shape != like.shape or buffer.device != like.device:
            raise ValueError(
                f"{name}: got shape {tuple(buffer.shape)} on {buffer.device}; accepted is "
                f"{tuple(like.shape)} on {like.device}"
            )
    with torch.no_grad():
        gradients = ops.backward(
            dout, None, q, k, v, out, softmax_lse, *packing, softmax_scale, causal,
            window_size_left, window_size_right, softcap, alibi_slopes, None, 1, deterministic,
        )  # fmt: skip
        for buffer, gradient in zip(buffers, gradients[:3], strict=True):
            if buffer is not None:
                buffer.copy_(gradient)


def _unpacked(name, tensor, dims, count):
    check_tensors(**{name: tensor})
    if tensor.dim() != dims or tensor.shape[-3] != count:
        lead = "batch, seqlen" if dims == 5 else "total"
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)}; accepted is ({lead}, {count}, heads, "
            "head_dim)"
        )
    return tensor.unbind(-3)


def _reject_softmax(return_softmax):
    if return_softmax:
        raise NotImplementedError(
            "return_softmax: got True; accepted is False, probabilities are never materialised"
        )
