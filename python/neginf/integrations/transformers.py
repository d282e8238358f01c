"""neginf as an attention implementation of Hugging Face transformers (tested with 5.24).

    from neginf.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="neginf")

transformers asks for a mask once per forward pass and hands it to the attention of every layer.
Here a mask is never materialised over (rows, keys). It is None, or says which rows and which keys
are real; the attention moves the real ones to the front and lets lengths do the rest, so padding
may lie left, right or between. What cannot be said that way raises. Under a causal mask or a window
rows that are padding come out as 0; a window counts real keys.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import masking_utils as masks

from neginf.attention import flash_attn_func, flash_attn_varlen_func


def register(name="neginf"):
    """Makes ``attn_implementation=name`` known to transformers.

    Supported: causal and bidirectional attention, sliding windows, padding, caches (dynamic,
    static, sliding), packed sequences by ``position_ids`` or ``cu_seq_lens_q``, GQA, softcap, sinks
    (``s_aux``). Not supported, and refused when a model asks for it: dropout,
    ``output_attentions``, position biases, prepared 4-dimensional masks, masks with overlays of
    their own (such as bidirectional blocks of image tokens) and attention in chunks.

    A window is what the layer passes as ``sliding_window``, as for transformers' flash attention.
    Where there is padding, q, k and v are copied, as unpadding copies them there.

    On a GPU the mask's values are looked at once per forward pass, to see whether there is any
    padding, as transformers' own masks do (not under torch.compile). Packed sequences given by
    position_ids alone wait for the device in every layer; pass cu_seq_lens_q, cu_seq_lens_k,
    max_length_q and max_length_k to avoid that.

    Args:
        name: what to call it.
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_mask)


def attention_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=masks.causal_mask_function,
    attention_mask=None,
    device="cpu",
    **_,
):
    """transformers' mask interface; what :func:`attention` takes as its attention_mask.

    Args:
        batch_size, q_length, kv_length: sizes of the attention to come.
        q_offset, kv_offset: position of the first row and of the first key; an int or a tensor.
        mask_function: the pattern, composed of transformers' own functions.
        attention_mask: (batch, positions) bool, False for padding; or None.
        device: where the mask is needed.

    Returns:
        None if all rows and keys are real; else (batch, 1, 1, q_length + kv_length) bool, which of
        the rows and then of the keys are real. Packed sequences: (batch, 1, 1, q_length) int64, the
        sequence that each row belongs to. (Four dimensions, because transformers passes on such
        a mask as it is, and would take one of two for padding when it asks a second time.)

    Raises:
        NotImplementedError: a pattern that is not supported.
        ValueError: an attention_mask that does not cover the rows.
    """
    pattern = _Pattern(mask_function, kv_offset + kv_length)
    if pattern.packed is not None:
        return pattern.packed[:, None, None]
    position = torch.arange(kv_length, device=device) + kv_offset
    row_position = torch.arange(q_length, device=device) + q_offset
    ends_together = (
        isinstance(q_offset, int) and isinstance(kv_offset, int)
    ) and q_offset + q_length == kv_offset + kv_length
    if pattern.window and not pattern.causal and not ends_together:
        # Lengths align the window to the last key, and the keys after the last row are needed.
        raise NotImplementedError(
            f"mask_function: got a window of both sides over {q_length} rows from {q_offset} on "
            f"and {kv_length} keys from {kv_offset} on; accepted are some that end together"
        )
    if attention_mask is None and (ends_together or not pattern.causal):
        return None

    keys = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    rows = torch.ones(batch_size, q_length, dtype=torch.bool, device=device)
    if pattern.causal:  # a static cache has room behind the last row
        keys = keys & (position < q_offset + q_length)
    if attention_mask is not None:
        positions = attention_mask.shape[-1]
        room = torch.zeros(batch_size, kv_length, dtype=torch.bool, device=device)
        keys = keys & torch.cat([attention_mask, room], 1)[:, position]
        # Where a row is decides what it sees only under these.
        if pattern.causal or pattern.window:
            if isinstance(q_offset, int) and q_offset + q_length > positions:
                raise ValueError(
                    f"attention_mask: got {positions} positions; accepted are at least "
                    f"{q_offset + q_length}, those of the rows"
                )
            rows = attention_mask[:, row_position]
    mask = torch.cat([rows, keys], 1)
    if not torch.compiler.is_compiling() and mask.all():
        return None
    return mask[:, None, None]


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    softcap=None,
    is_causal=None,
    s_aux=None,
    position_bias=None,
    output_attentions=False,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    max_length_q=None,
    max_length_k=None,
    **_,
):
    """transformers' attention interface.

    Args:
        module: the attention layer; its ``is_causal`` (True if it has none) counts when the
            argument is None.
        query: (batch, num_heads, seqlen_q, head_dim). Under autocast query, key and value are cast
            to its dtype, as torch's attention casts them.
        key, value: (batch, num_heads_k, seqlen_k, head_dim); value may have a smaller head_dim.
        attention_mask: what :func:`attention_mask` returned.
        scaling: of the scores, before softcap; None is ``1 / sqrt(head_dim)``.
        sliding_window: number of keys that a row sees up to itself, and as many after it without
            is_causal.
        s_aux: (num_heads), a learnable sink.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: all of them: sequences are packed.

    Returns:
        (out, None), out (batch, seqlen_q, num_heads, head_dim of value); probabilities are never
        materialised.

    Raises:
        NotImplementedError: what :func:`register` says is not supported.
        ValueError: an attention_mask of another kind, a value of larger head_dim, or only some of
            what describes packed sequences.
    """
    if dropout:
        raise NotImplementedError(f"dropout: got {dropout}; accepted is 0.0")
    if position_bias is not None:
        raise NotImplementedError("position_bias: got a tensor; accepted is None")
    if output_attentions:
        raise NotImplementedError("output_attentions: got True; accepted is False")
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if torch.is_autocast_enabled(query.device.type):  # which leaves q and k, once rotated, float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t.to(dtype) for t in (query, key, value))
    if value.shape[-1] > query.shape[-1]:
        raise ValueError(
            f"value: got head_dim {value.shape[-1]}; accepted is at most that of query, "
            f"{query.shape[-1]}"
        )
    side = -1 if sliding_window is None else sliding_window - 1
    options = {
        "softmax_scale": scaling,
        "causal": getattr(module, "is_causal", True) if is_causal is None else is_causal,
        "window_size": (side, side),
        "softcap": softcap or 0.0,
        "sink": None if s_aux is None else s_aux.to(_accumulate_type(query)),
    }

    is_padded = attention_mask is not None and attention_mask.dtype == torch.bool
    packing = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    is_packed = [given is not None for given in packing]
    if any(is_packed) and not all(is_packed):
        raise ValueError(
            f"cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: got {sum(is_packed)} of "
            "them; accepted are all or none"
        )
    if all(is_packed) and not is_padded:
        out = _attend_packed(query, key, value, *packing, options)
    elif attention_mask is None:
        out = flash_attn_func(query, key, value, **options)
    elif is_padded:
        out = _attend_padded(query, key, value, _columns(attention_mask, query, key), options)
    else:
        cu_seqlens, longest = _packing_of(_columns(attention_mask, query))
        packing = (cu_seqlens, cu_seqlens, longest, longest)
        out = _attend_packed(query, key, value, *packing, options)
    return out, None


class _Pattern:
    """What a mask function of transformers means, taken apart into the functions it is made of."""

    def __init__(self, mask_function, num_positions):
        self.causal = self.window = False
        self.packed = None  # (batch, rows): the sequence that each row belongs to
        self._num_positions = num_positions
        self._read(mask_function)

    def _read(self, function):
        if function is masks.causal_mask_function:
            self.causal = True
            return
        if function is masks.bidirectional_mask_function:
            return
        name = getattr(function, "__qualname__", repr(function))
        kind = _KINDS.get(name)
        parts = _closure_of(function) if kind else {}
        if kind == "and":
            for part in parts["mask_functions"]:
                self._read(part)
        elif kind == "remap":  # positions within packed sequences; their order is that of the rows
            self._read(parts["mask_function"])
        elif kind == "window":
            self.window = True
        elif kind == "packed":
            self.packed = parts["packed_sequence_mask"]
        elif not self._is_one_chunk(kind, parts):
            raise NotImplementedError(
                f"mask_function: got {name}; accepted are causal and "
                "bidirectional masks, sliding windows and packed sequences"
            )

    def _is_one_chunk(self, kind, parts):
        return kind == "chunk" and self._num_positions <= parts["chunk_size"]


def _closure_of(function):
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


# By the names that transformers' factories give to what they return; not every version has all.
_KINDS = {
    getattr(masks, factory)(*arguments).__qualname__: kind
    for factory, arguments, kind in (
        ("and_masks", (), "and"),
        ("sliding_window_overlay", (1,), "window"),
        ("sliding_window_bidirectional_overlay", (1,), "window"),
        ("chunked_overlay", (1, None), "chunk"),
        ("packed_sequence_mask_function", (None,), "packed"),
        ("remap_positions_for_packed_sequence", (None, None), "remap"),
    )
    if hasattr(masks, factory)
}


def _columns(mask, *tensors):
    """(batch, columns): one column for each row of the tensors."""
    expected = (tensors[0].shape[0], 1, 1, sum(t.shape[1] for t in tensors))
    if mask.is_floating_point() or mask.shape != expected:
        raise ValueError(
            f"attention_mask: got {mask.dtype} of shape {tuple(mask.shape)}; accepted is what "
            "neginf's mask function made of a 2-dimensional mask of padding, here of shape "
            f"{expected}"
        )
    return mask[:, 0, 0]


def _attend_padded(query, key, value, mask, options):
    """Moves what is real to the front, attends to lengths, and moves the rows back."""
    batch, seqlen_q, seqlen_k = query.shape[0], query.shape[1], key.shape[1]
    rows, keys = mask.split([seqlen_q, seqlen_k], dim=1)
    row_order, key_order = (
        m.int().argsort(dim=1, descending=True, stable=True) for m in (rows, keys)
    )
    entry = torch.arange(batch, device=mask.device)[:, None]
    out = flash_attn_func(
        query[entry, row_order],
        key[entry, key_order],
        value[entry, key_order],
        seqused_q=rows.sum(1, dtype=torch.int32),
        seqused_k=keys.sum(1, dtype=torch.int32),
        **options,
    )
    return out[entry, row_order.argsort(1)]


def _attend_packed(query, key, value, cu_q, cu_k, max_q, max_k, options):
    out = flash_attn_varlen_func(
        *(t.reshape(-1, *t.shape[-2:]) for t in (query, key, value)),
        cu_q.to(torch.int32),
        cu_k.to(torch.int32),
        int(max_q),
        int(max_k),
        **options,
    )
    return out.view(*query.shape[:-1], value.shape[-1])


def _packing_of(sequence):
    """cu_seqlens and the longest length, of (batch, rows) numbers of sequences."""
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    first_rows = starts.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(first_rows, (0, 1), value=sequence.numel())
    return cu_seqlens, cu_seqlens.diff().max().item()


def _accumulate_type(query):
    return torch.promote_types(query.dtype, torch.float32)
