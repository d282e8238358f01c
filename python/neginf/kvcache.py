"""Attention over a cache of keys and values, with flash-attn's names and order."""

import torch

from neginf import ops
from neginf._checks import check_ints, check_tensors
from neginf.attention import call_operator, window_sides


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
    *,
    page_table=None,
    rotary_seqlens=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    cu_seqlens_k_new=None,
    sink=None,
    seqlen_k_per_split=None,
    out=None,
    return_lse=False,
    check_inputs=False,
):
    """Attention of q over the keys and values in a cache, after writing k and v behind them.

    What a row without keys gives, NaN, and memory that no visible key owns are as in
    :func:`neginf.flash_attn_func` (rules P1 to P6). Sequence b has the keys in its slots
    ``cache_leftpad[b]`` to ``cache_seqlens[b]``, and those of k; masks are aligned to the last one.
    Nothing waits for the GPU, and a captured graph may be replayed with other lengths and pages.

    Numbers in cache_seqlens, cache_leftpad, cache_batch_idx and page_table that mean nothing are
    never followed: lengths end at the last slot, and slots in an entry or a page that does not
    exist hold no key (nor does k go there). ``check_inputs`` raises instead.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim) or, with cu_seqlens_q, (total_q, num_heads,
            head_dim); float16 or bfloat16, on the CPU also float32 and float64.
        k_cache: (batch_cache, seqlen_cache, num_heads_k, head_dim), or with a page table
            (num_pages, page_size, num_heads_k, head_dim), page_size from 1, fast if a multiple of
            16 (of 32 up to head_dim 64). Written to if k is given.
        v_cache: as k_cache, of head_dim_v up to head_dim.
        k: (batch, seqlen_new, num_heads_k, head_dim) or, with cu_seqlens_k_new, (total_new,
            num_heads_k, head_dim). Goes to the slots from ``cache_seqlens`` on.
        v: as k, of head_dim_v.
        rotary_cos: (positions, rotary_dim / 2), dtype of q. Rotates k by its slot, and q: row i by
            that of key i of k if causal or with a window, else by that of key 0. Needs k.
        rotary_sin: as rotary_cos.
        cache_seqlens: (batch) int32, or one int for all: slots in use before k, leftpad included;
            None is all of them.
        cache_batch_idx: (batch) int32, the entry of the cache that a sequence has; None is its own
            number. Not with a page table.
        cache_leftpad: (batch) int32, slots in front that hold no key.
        block_table: another name of page_table.
        softmax_scale, causal, window_size, softcap, alibi_slopes, sink: as in
            :func:`neginf.flash_attn_func`.
        rotary_interleaved: rotate elements (2 i, 2 i + 1) together, else (i, i + rotary_dim / 2).
        num_splits: shares that the keys of each sequence are divided into; 0 divides the work of
            the whole batch evenly over the GPU. Changes nothing but rounding.
        return_softmax_lse: return ``(out, lse)``.
        page_table: (batch, pages of a sequence) int32: slot s is row ``s % page_size`` of page
            ``page_table[b, s // page_size]``.
        rotary_seqlens: (batch) int32, the position of key 0 of k in place of its slot.
        cu_seqlens_q: (batch + 1) int32, for sequences of q packed one after the other.
        max_seqlen_q: an upper bound of their lengths; None is total_q.
        cu_seqlens_k_new: (batch + 1) int32, for those of k and v.
        seqlen_k_per_split: keys per share, counted from key 0 and rounded up to what the kernel
            takes at a time. The output of a sequence is then bitwise the same whatever else is in
            the batch. None is as num_splits says.
        out: a tensor for the result, of its shape and dtype.
        return_lse: as return_softmax_lse.
        check_inputs: look at the numbers in tensors, which waits for the GPU.

    Returns:
        out, as q but of head_dim_v; with ``return_softmax_lse`` or ``return_lse`` also lse, (batch,
        num_heads, seqlen_q) or (num_heads, total_q), natural logarithm, float32 (float64 for
        float64 q). Neither has a gradient.

    Raises:
        ValueError: a shape, device or value that is not accepted; the message names the argument.
        TypeError: a dtype that is not accepted, or a window that is not of ints.
        NotImplementedError: no kernel in this build for these tensors.

    Source: Dao et al., Flash-Decoding (2023); Kwon et al., PagedAttention (2023); for rows without
    keys, rules P1 to P6 of docs/contract.md.
    """
    if block_table is not None:
        if page_table is not None:
            raise ValueError(
                "block_table: got a tensor together with page_table; accepted is one of the names"
            )
        page_table = block_table
    window_left, window_right = window_sides(window_size)
    keys_per_split = _keys_per_split(seqlen_k_per_split)
    if max_seqlen_q is None and cu_seqlens_q is not None:
        max_seqlen_q = q.shape[0]
    if cache_seqlens is not None and not isinstance(cache_seqlens, torch.Tensor):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full(
            (batch,), _length(cache_seqlens), dtype=torch.int32, device=q.device
        )
    _check_new(k, v, rotary_cos, rotary_sin, rotary_seqlens, cu_seqlens_k_new, cache_seqlens)
    if check_inputs:
        _check_values(
            k_cache, k, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, rotary_cos,
            rotary_seqlens, cu_seqlens_k_new,
        )  # fmt: skip
    options = (
        page_table, cache_batch_idx, cache_leftpad, cu_seqlens_q, max_seqlen_q, softmax_scale,
        causal, window_left, window_right, softcap, alibi_slopes, sink, num_splits, keys_per_split,
    )  # fmt: skip
    if k is not None:
        # Before anything is written.
        call_operator(ops.check_decode, q, k_cache, v_cache, cache_seqlens, *options, out)
        advances = causal or window_left >= 0 or window_right >= 0
        rotated_q, cache_seqlens = call_operator(
            ops.append,
            q, k, v, k_cache, v_cache, cache_seqlens, page_table, cache_batch_idx,
            cu_seqlens_q, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens,
            rotary_interleaved, advances,
        )  # fmt: skip
        if rotary_cos is not None:
            q = rotated_q
    arguments = (q, k_cache, v_cache, cache_seqlens, *options)
    if out is None:
        out, lse = call_operator(ops.decode, *arguments)
    else:
        lse = call_operator(ops.decode_out, *arguments, out)
    return (out, lse) if return_lse or return_softmax_lse else out


def _length(cache_seqlens):
    accepted = "a tensor, or an int from 0 and less than 2^30"
    (length,) = check_ints("cache_seqlens", cache_seqlens, (cache_seqlens,), accepted)
    if not 0 <= length < 2**30:
        raise ValueError(f"cache_seqlens: got {length}; accepted is {accepted}")
    return length


def _keys_per_split(seqlen_k_per_split):
    if seqlen_k_per_split is None:
        return 0
    accepted = "an integer from 1, or None"
    (keys,) = check_ints("seqlen_k_per_split", seqlen_k_per_split, (seqlen_k_per_split,), accepted)
    if keys < 1:
        raise ValueError(f"seqlen_k_per_split: got {keys}; accepted is {accepted}")
    return keys


def _check_new(k, v, rotary_cos, rotary_sin, rotary_seqlens, cu_seqlens_k_new, cache_seqlens):
    """Which of the arguments go together."""
    if (k is None) != (v is None):
        raise ValueError("k, v: got only one; accepted are both or neither")
    if k is None:
        for name, value in (
            ("rotary_cos", rotary_cos),
            ("rotary_sin", rotary_sin),
            ("rotary_seqlens", rotary_seqlens),
            ("cu_seqlens_k_new", cu_seqlens_k_new),
        ):
            if value is not None:
                raise ValueError(f"{name}: got a tensor without k; accepted is None")
    elif cache_seqlens is None:
        raise ValueError("cache_seqlens: got None together with k; accepted is where k goes")


def _check_values(
    k_cache, k, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, rotary_cos,
    rotary_seqlens, cu_seqlens_k_new,
):  # fmt: skip
    """The numbers in tensors, with the entry that is wrong."""
    given = {
        "k_cache": k_cache, "k": k, "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad,
        "page_table": page_table, "rotary_cos": rotary_cos, "rotary_seqlens": rotary_seqlens,
        "cu_seqlens_k_new": cu_seqlens_k_new,
    }  # fmt: skip
    check_tensors(**{name: value for name, value in given.items() if value is not None})
    tables = (cache_seqlens, cache_leftpad, cache_batch_idx, rotary_seqlens)
    batch = _batch(*tables, page_table)
    if k_cache.dim() != 4 or any(
        tensor is not None and (tensor.dim() != dim or tensor.shape[0] != size)
        for tensor, dim, size in (
            *((table, 1, batch) for table in tables),
            (page_table, 2, batch),
            (cu_seqlens_k_new, 1, batch + 1),
        )
    ):
        return  # the operators say what is wrong
    entries, entry_rows = k_cache.shape[:2]
    capacity = entry_rows if page_table is None else page_table.shape[1] * entry_rows
    if cu_seqlens_k_new is not None:
        new = cu_seqlens_k_new.diff().tolist()
    else:
        new = [0 if k is None else k.shape[1]] * batch
    before = [capacity] * batch if cache_seqlens is None else cache_seqlens.tolist()
    for b, length in enumerate(before):
        if not 0 <= length <= capacity - new[b]:
            raise ValueError(
                f"cache_seqlens: got {length} at index {b}; accepted are 0 to {capacity - new[b]}, "
                "the slots of a sequence" + (f" less the {new[b]} rows of k" if new[b] else "")
            )
    lengths = [length + added for length, added in zip(before, new, strict=True)]
    for b, pad in enumerate([] if cache_leftpad is None else cache_leftpad.tolist()):
        if not 0 <= pad <= lengths[b]:
            raise ValueError(
                f"cache_leftpad: got {pad} at index {b}; accepted are 0 to the slots in use, "
                f"{lengths[b]}"
            )
    for b, entry in enumerate([] if cache_batch_idx is None else cache_batch_idx.tolist()):
        if not 0 <= entry < entries:
            raise ValueError(
                f"cache_batch_idx: got {entry} at index {b}; accepted are 0 to {entries - 1}"
            )
    for b, row in enumerate([] if page_table is None else page_table.tolist()):
        for column, page in enumerate(row[: -(-lengths[b] // entry_rows)]):
            if not 0 <= page < entries:
                raise ValueError(
                    f"page_table: got {page} at index ({b}, {column}), in use by the {lengths[b]} "
                    f"slots of sequence {b}; accepted are 0 to {entries - 1}"
                )
    if rotary_cos is not None:
        firsts = before if rotary_seqlens is None else rotary_seqlens.tolist()
        for b, first in enumerate(firsts):
            if not 0 <= first <= rotary_cos.shape[0] - new[b]:
                raise ValueError(
                    f"{'cache_seqlens' if rotary_seqlens is None else 'rotary_seqlens'}: got "
                    f"{first} at index {b}; accepted are the positions of rotary_cos, 0 to "
                    f"{rotary_cos.shape[0] - new[b]} for {new[b]} rows of k"
                )


def _batch(*tensors):
    """Their first size: what is checked of their shapes, the operators check."""
    return next((tensor.shape[0] for tensor in tensors if tensor is not None and tensor.dim()), 0)
