"""Attention over keys that come in pieces: shared prefixes, and chunks one after the other.

Each piece is attended to by itself, and the states are merged. So a prefix that many sequences
share is read once for all their rows, and keys that do not fit at once pass through in chunks.
Pieces may be empty: they give (0, -inf), which changes nothing.
"""

from typing import NamedTuple

import torch

from neginf._checks import check_same_head_dim, check_tensors
from neginf.attention import flash_attn_func, flash_attn_varlen_func
from neginf.merge import apply_sink, merge_states


class CascadeLevel(NamedTuple):
    """The keys of one level of :func:`cascade_attention`, and which rows share which of them.

    Group g of this level are the rows ``cu_seqlens_q[g]`` to ``cu_seqlens_q[g + 1]``; all of them
    see the keys ``cu_seqlens_k[g]`` to ``cu_seqlens_k[g + 1]``.
    """

    k: torch.Tensor  # (total_k, num_heads_k, head_dim)
    v: torch.Tensor  # as k, or of a smaller head_dim, the same on every level
    cu_seqlens_q: torch.Tensor  # (groups + 1) int32
    cu_seqlens_k: torch.Tensor  # (groups + 1) int32
    max_seqlen_q: int  # an upper bound of the groups' rows
    max_seqlen_k: int  # an upper bound of the groups' keys


def cascade_attention(
    q,
    levels,
    *,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    sink=None,
    deterministic=False,
    return_lse=False,
):
    """Attention over levels of keys, from those that most rows share to each sequence's own.

    A row sees all keys of its group on every level but the last; there the causal mask applies. It
    is the same as one call on the concatenation of a row's levels. With causal that asks for at
    least as many keys as rows in each group of the last level, less one: rows before them would not
    see all of the levels above. Chunked prefill of packed sequences is the case of two levels, the
    cached context and the new tokens.

    Args:
        q: (total_q, num_heads, head_dim), as in :func:`neginf.flash_attn_varlen_func`.
        levels: sequence of :class:`CascadeLevel` (or tuples like it), the last one the sequences'
            own keys. Groups and sequences may be empty.
        softmax_scale, softcap, deterministic: as in :func:`neginf.flash_attn_func`.
        causal: mask the last level, aligned to the bottom-right corner of each group.
        sink: (num_heads), as in :func:`neginf.flash_attn_func`; counted once.
        return_lse: return ``(out, lse)``.

    Returns:
        out, shaped and typed as q, but of the head_dim of v; with ``return_lse`` also lse,
        (num_heads, total_q), natural logarithm. Rows in no group of any level have out = 0,
        lse = -inf (P6). Differentiable in q, in k and v of every level, and in the sink.

    Raises:
        ValueError: no levels, or v of different head_dim; on the CPU also too few keys for causal
            in the last level. Otherwise, and TypeError, as :func:`neginf.flash_attn_varlen_func`.

    Source: Ye et al., FlashInfer (2025), on cascade inference; the merge is contract section 5.
    """
    levels = [CascadeLevel(*level) for level in levels]
    if not levels:
        raise ValueError("levels: got none; accepted is one level or more")
    for i, level in enumerate(levels):
        check_tensors(**{f"levels[{i}].v": level.v})
        check_same_head_dim(f"levels[{i}].v", level.v, "levels[0].v", levels[0].v)
    if causal:
        _check_causal_level(levels[-1])
    states = [
        flash_attn_varlen_func(
            q,
            level.k,
            level.v,
            level.cu_seqlens_q,
            level.cu_seqlens_k,
            level.max_seqlen_q,
            level.max_seqlen_k,
            softmax_scale=softmax_scale,
            causal=causal and level is levels[-1],
            softcap=softcap,
            deterministic=deterministic,
            sink=sink if level is levels[-1] else None,
            return_lse=True,
        )
        for level in levels
    ]
    return _merged(states, return_lse)


def shared_prefix_attention(
    q,
    k_prefix,
    v_prefix,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    sink=None,
    deterministic=False,
    return_lse=False,
):
    """Attention of a batch whose sequences all begin with the same keys, which are stored once.

    The same as :func:`neginf.flash_attn_func` on k_prefix in front of each k.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k_prefix, v_prefix: (seqlen_prefix, num_heads_k, head_dim); may be empty.
        k, v: (batch, seqlen_k, num_heads_k, head_dim), each sequence's own keys; may be empty. v
            and v_prefix may have a smaller head_dim, both the same.
        softmax_scale, softcap, deterministic: as in :func:`neginf.flash_attn_func`.
        causal: aligned to the bottom-right corner. Needs seqlen_k >= seqlen_q - 1, so that every
            row sees the whole prefix.
        sink: (num_heads), as in :func:`neginf.flash_attn_func`; counted once.
        return_lse: return ``(out, lse)``.

    Returns:
        out, shaped and typed as q, but of the head_dim of v; with ``return_lse`` also lse,
        (batch, num_heads, seqlen_q), natural logarithm. Differentiable in all tensors.

    Raises:
        ValueError: another number of dimensions; v_prefix of another head_dim than v; too few keys
            for causal. Otherwise, and
            TypeError, as :func:`neginf.flash_attn_func`.
    """
    tensors = {"q": q, "k_prefix": k_prefix, "v_prefix": v_prefix, "k": k, "v": v}
    check_tensors(**tensors)
    for name, tensor in tensors.items():
        lead = "seqlen_prefix" if name.endswith("prefix") else "batch, seqlen"
        accepted = f"({lead}, heads, head_dim)"
        if tensor.dim() != len(accepted.split(",")):
            raise ValueError(f"{name}: got {tensor.dim()} dimensions; accepted is {accepted}")
    check_same_head_dim("v_prefix", v_prefix, "v", v)
    if causal and k.shape[1] < q.shape[1] - 1:
        raise ValueError(
            f"k: got {k.shape[1]} keys for {q.shape[1]} rows; accepted with causal are at least "
            f"{q.shape[1] - 1}"
        )
    options = {
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "deterministic": deterministic,
        "return_lse": True,
    }
    own = flash_attn_func(q, k, v, causal=causal, sink=sink, **options)
    batch, seqlen_q, num_heads, head_dim = q.shape
    rows = q.reshape(1, batch * seqlen_q, num_heads, head_dim)
    out, lse = flash_attn_func(rows, k_prefix[None], v_prefix[None], **options)
    lse = lse.view(num_heads, batch, seqlen_q).transpose(0, 1)
    out = out.view(batch, seqlen_q, num_heads, v_prefix.shape[-1])
    return _merged([(out, lse), own], return_lse)


def chunked_attention(
    q,
    chunks,
    seqlen_k,
    *,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    sink=None,
    deterministic=False,
    return_lse=False,
):
    """Attention over keys that arrive in chunks, such as a long context that is gathered from pages
    or dequantised piece by piece. Only one chunk has to be there at a time.

    The same as :func:`neginf.flash_attn_func` on the concatenation of the chunks. Between chunks
    the state is kept in float32 (float64 for float64 q): each chunk's out is rounded to the dtype
    of q and so is the sum, but no sum in between.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        chunks: iterable of (k, v), each (batch, seqlen, num_heads_k, head_dim), in the order of
            their keys; consumed one by one. Chunks may be empty, and there may be none. Every v may
            have a smaller head_dim, all the same.
        seqlen_k: number of keys of all chunks together, by which causal is aligned to the
            bottom-right corner.
        softmax_scale, causal, softcap, deterministic: as in :func:`neginf.flash_attn_func`.
        sink: (num_heads), as in :func:`neginf.flash_attn_func`; counted once.
        return_lse: return ``(out, lse)``.

    Returns:
        out, shaped and typed as q, but of the head_dim of v if there is a chunk; with
        ``return_lse`` also lse, (batch, num_heads, seqlen_q), natural logarithm. Differentiable in
        q, in every chunk and in the sink.

    Raises:
        ValueError: chunks that do not add up to seqlen_k, or a v of another head_dim than the first
            one's, as soon as that is known. Otherwise, and
            TypeError, as :func:`neginf.flash_attn_func`.
    """
    check_tensors(q=q)
    if q.dim() != 4:
        raise ValueError(
            f"q: got {q.dim()} dimensions; accepted is (batch, seqlen_q, heads, head_dim)"
        )
    accumulate = torch.promote_types(q.dtype, torch.float32)
    batch, seqlen_q, num_heads, head_dim = q.shape

    def state_without_keys(head_dim_v):
        out = q.new_zeros((batch, seqlen_q, num_heads, head_dim_v), dtype=accumulate)
        lse = q.new_full((batch, num_heads, seqlen_q), float("-inf"), dtype=accumulate)
        return (out, lse) if sink is None else apply_sink(out, lse, sink)

    state = None
    end = 0
    for k, v in chunks:
        check_tensors(k=k, v=v)
        end += k.shape[1]
        if end > seqlen_k:
            raise ValueError(
                f"chunks: got {end} keys or more; accepted are seqlen_k = {seqlen_k} in all"
            )
        if state is not None:
            check_same_head_dim("chunks: v", v, "the first chunk", state[0])
        # Counted from the chunk's own last key, the diagonal lies seqlen_k - end keys to the right.
        chunk_out, chunk_lse = flash_attn_func(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            window_size=(-1, seqlen_k - end if causal else -1),
            softcap=softcap,
            deterministic=deterministic,
            return_lse=True,
        )
        del k, v  # or this chunk would stay while the next one is made
        if state is None:
            state = state_without_keys(chunk_out.shape[-1])
        out, lse = state
        state = merge_states([out, chunk_out.to(accumulate)], [lse, chunk_lse])
    if end != seqlen_k:
        raise ValueError(f"chunks: got {end} keys; accepted are seqlen_k = {seqlen_k}")
    out, lse = state_without_keys(head_dim) if state is None else state
    out = out.to(q.dtype)
    return (out, lse) if return_lse else out


def _merged(states, return_lse):
    out, lse = merge_states(*zip(*states, strict=True))
    return (out, lse) if return_lse else out


def _check_causal_level(level):
    """What can be seen without waiting for a GPU, and without values for a compiler."""
    check_tensors(cu_seqlens_q=level.cu_seqlens_q, cu_seqlens_k=level.cu_seqlens_k)
    on_cpu = level.cu_seqlens_q.is_cpu and level.cu_seqlens_k.is_cpu
    if torch.compiler.is_compiling() or not on_cpu:
        return
    missing = level.cu_seqlens_q.diff() - 1 - level.cu_seqlens_k.diff()
    if (missing > 0).any():
        group = missing.argmax().item()
        rows, keys = (cu.diff()[group].item() for cu in (level.cu_seqlens_q, level.cu_seqlens_k))
        raise ValueError(
            f"levels[-1]: got {keys} keys for the {rows} rows of group {group}; accepted with "
            f"causal are at least {rows - 1}"
        )
