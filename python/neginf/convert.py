"""States of other attention libraries <-> states of this one.

Libraries agree on `out` and differ in the log-sum-exp beside it: its base, its layout, and what it
holds in a row that saw no key. Each converter is named after its source and says what that source
returns. All of them

* take and return a pair (out, lse), with out (batch, seqlen, heads, head_dim) or (total, heads,
  head_dim), so that results go straight into :func:`neginf.merge_states`;
* are differentiable in both; the gradient of lse is exactly 0 in rows without keys;
* never wait for the device: they select, and do not look at values on the host.

``-inf`` is empty, whatever `out` holds beside it (contract section 5); for FlashAttention-3 and -4
alone, which write it for a NaN score as well, a NaN in `out` says so. ``+inf`` never becomes
``-inf`` by itself: the libraries that write it do so for a row without keys and for a row with a
NaN score alike, and only `out` tells them apart. A row so marked is empty if its `out` is exactly
0, as those libraries leave it, and NaN otherwise: "empty" needs evidence.
"""

import math

import torch

from neginf._checks import check_state, check_tensors
from neginf.merge import NEG_INF

INF = float("inf")
NAN = float("nan")
LN_2 = math.log(2)


def from_fa2(out, lse, *, cu_seqlens_q=None):
    """A result of FlashAttention-2, or of torch's flash attention (out transposed to its layout).

    FlashAttention-2 returns natural logarithms as (batch, heads, seqlen) or (heads, total), and
    **+inf** both for a row without keys, where out is 0, and for a row with a NaN score, where out
    is NaN. Old releases pad the lse of packed sequences to (batch, heads, max_seqlen): pass
    ``cu_seqlens_q`` with those. It does not write rows past ``cu_seqlens_q[-1]``: what a converter
    makes of them means nothing.

    Args:
        out: (batch, seqlen, heads, head_dim) or (total, heads, head_dim).
        lse: (batch, heads, seqlen) or (heads, total), float32 (float64 with float64); with
            cu_seqlens_q (batch, heads, max_seqlen).
        cu_seqlens_q: (batch + 1) int32, on the device of lse: lse is padded.

    Returns:
        (out, lse) in the layout of this library: out itself, and lse with -inf where the row is
        empty and NaN where the source had a NaN.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: something that is no tensor, or an lse of another dtype.
    """
    check_tensors(out=out, lse=lse)
    if cu_seqlens_q is not None:
        lse = lse_from_padded(lse, cu_seqlens_q, out.shape[0])
    check_state(out, lse)
    return out, _marks_to_empty(out, lse)


def to_fa2(out, lse, *, cu_seqlens_q=None, max_seqlen_q=None):
    """A state as FlashAttention-2 would return it: +inf and an out of 0 in rows without keys.

    A NaN stays NaN, where FlashAttention-2 itself writes +inf beside a NaN in out.

    Args:
        out, lse: a state of this library.
        cu_seqlens_q, max_seqlen_q: both or none; with them lse is padded to (batch, heads,
            max_seqlen_q), +inf behind each sequence, as old releases have it.

    Returns:
        (out, lse).

    Raises:
        ValueError, TypeError: as :func:`from_fa2`; only one of cu_seqlens_q and max_seqlen_q.
    """
    check_state(out, lse)
    if (cu_seqlens_q is None) != (max_seqlen_q is None):
        missing = "max_seqlen_q" if max_seqlen_q is None else "cu_seqlens_q"
        raise ValueError(f"{missing}: got None; accepted are both of cu_seqlens_q, max_seqlen_q")
    out = _without_payload(out, lse == NEG_INF)
    if cu_seqlens_q is not None:
        lse = lse_to_padded(lse, cu_seqlens_q, max_seqlen_q)
    return out, torch.where(lse == NEG_INF, INF, lse)


def from_fa3(out, lse):
    """A result of FlashAttention-3 or FlashAttention-4.

    They return natural logarithms as (batch, heads, seqlen) or (heads, total), and -inf for a row
    without keys; FlashAttention-3 returns **+inf** instead when the key tensor has no rows. For a
    row with a NaN score they return **-inf** too, beside a NaN in out: NaN is never empty (rule
    P3), so a row with a NaN in out is NaN here. FlashAttention-3 with more than one split leaves
    the split with the NaN out of the sum: that cannot be seen afterwards. FlashAttention-4 called
    with ``qv`` returns (batch, seqlen, heads): transpose that first. An lse that includes
    FlashAttention-4's sink is a state like any other.

    Args:
        out: (batch, seqlen, heads, head_dim) or (total, heads, head_dim).
        lse: (batch, heads, seqlen) or (heads, total), float32 (float64 with float64).

    Returns:
        (out, lse): out itself, and lse with -inf where the row is empty, NaN where lse is infinite
        and out holds a NaN, or where lse is +inf and out is not 0.

    Raises:
        ValueError, TypeError: as :func:`from_fa2`.
    """
    check_state(out, lse)
    holds_nan = out.isnan().any(-1).transpose(-1, -2)
    return out, torch.where(lse.isinf() & holds_nan, NAN, _marks_to_empty(out, lse))


def to_fa3(out, lse):
    """A state as FlashAttention-3 and FlashAttention-4 return it.

    The same pair, but for out in rows without keys: it is 0, as NaN there would mean a NaN score.

    The splits that FlashAttention-3's ``flash_attn_combine`` takes are laid out otherwise, (splits,
    batch, seqlen, heads): transpose those.

    Args:
        out, lse: a state of this library.

    Returns:
        (out, lse).

    Raises:
        ValueError, TypeError: as :func:`from_fa2`.
    """
    check_state(out, lse)
    return _without_payload(out, lse == NEG_INF), lse


def from_flashmla(out, lse, *, attn_sink=None):
    """A result of FlashMLA.

    It returns natural logarithms: decode (batch, heads, seqlen) beside out (batch, seqlen, heads,
    head_dim), prefill (total, heads) beside out (total, heads, head_dim). A row without keys holds
    **+inf** and an out of 0. A row with a NaN score holds NaN after a sparse prefill; after a
    decode it depends on the kernel, and a +inf beside an out that is not 0 is taken for NaN.

    FlashMLA scales out by its ``attn_sink`` and leaves it out of lse, so that the two do not belong
    together: pass the same attn_sink here, and lse will include it.

    Args:
        out: (batch, seqlen, heads, head_dim) of a decode or (total, heads, head_dim) of a prefill.
        lse: (batch, heads, seqlen) or (total, heads), float32 (float64 with float64).
        attn_sink: (heads), as passed to FlashMLA.

    Returns:
        (out, lse) in the layout of this library. With a finite attn_sink a row without keys has
        lse = attn_sink; an attn_sink of +inf, which leaves nothing of out, gives NaN.

    Raises:
        ValueError, TypeError: as :func:`from_fa2`; an attn_sink of another shape.
    """
    check_tensors(out=out, lse=lse)
    heads_last = out.dim() == 3
    check_state(out, lse, heads_last)
    lse = _heads_first(lse, heads_last)
    lse = _marks_to_empty(out, lse)
    return out, lse if attn_sink is None else _with_sink(lse, attn_sink)


def to_flashmla(out, lse):
    """A state as FlashMLA returns it without a sink: +inf and an out of 0 in rows without keys, and
    lse laid out (batch, heads, seqlen) for a decode, (total, heads) for a prefill. A NaN stays NaN.

    Args:
        out, lse: a state of this library.

    Returns:
        (out, lse).

    Raises:
        ValueError, TypeError: as :func:`from_fa2`.
    """
    check_state(out, lse)
    empty = lse == NEG_INF
    lse = _heads_last(torch.where(empty, INF, lse), out.dim() == 3)
    return _without_payload(out, empty), lse


def from_flashinfer(out, lse):
    """A result of FlashInfer.

    It returns logarithms **in base 2** as (total, heads), -inf for a row without keys and NaN for a
    row with a NaN score. It writes no +inf, so one that is found becomes NaN. (Its sparse MLA
    kernel for sm120 marks rows without keys by -1e30: that is :func:`from_sentinel` with
    ``value=-1e30, base2=True, heads_last=True``.)

    Args:
        out: (total, heads, head_dim).
        lse: (total, heads), float32 (float64 with float64), base 2.

    Returns:
        (out, lse) in the layout of this library, with out = 0 in rows without keys.

    Raises:
        ValueError, TypeError: as :func:`from_fa2`.
    """
    check_state(out, lse, heads_last=True)
    _check_packed(out)
    lse = _heads_first(lse, True)
    return _state(out, lse, lse == NEG_INF, base2=True)


def to_flashinfer(out, lse):
    """A state as FlashInfer returns it: logarithms in base 2, (total, heads).

    Args:
        out: (total, heads, head_dim).
        lse: (heads, total), natural logarithm.

    Returns:
        (out, lse).

    Raises:
        ValueError, TypeError: as :func:`from_fa2`.
    """
    check_state(out, lse)
    _check_packed(out)
    return out, _heads_last(lse_to_base2(lse), True)


def from_sentinel(out, lse, value, *, base2=False, heads_last=False):
    """A result of a library that marks rows without keys by a finite number, such as -1e30.

    Only that very number, rounded to the dtype of lse, and -inf mean "empty": a row whose keys all
    have low scores may lie below the sentinel, and is kept (rule P2). Sums of sentinels are not
    recognised: convert before anything is merged. A +inf that is found becomes NaN.

    Args:
        out: (batch, seqlen, heads, head_dim) or (total, heads, head_dim).
        lse: (batch, heads, seqlen) or (heads, total), float32 (float64 with float64).
        value: the sentinel, finite in the dtype of lse, in its base.
        base2: lse holds logarithms in base 2.
        heads_last: lse is laid out (batch, seqlen, heads) or (total, heads).

    Returns:
        (out, lse) in the layout of this library, with out = 0 in rows without keys.

    Raises:
        ValueError: a value that is not finite; otherwise as :func:`from_fa2`.
        TypeError: as :func:`from_fa2`.
    """
    check_state(out, lse, heads_last)
    _check_sentinel(value, lse.dtype)
    lse = _heads_first(lse, heads_last)
    return _state(out, lse, (lse == value) | (lse == NEG_INF), base2)


def to_sentinel(out, lse, value, *, base2=False, heads_last=False):
    """A state for a library that marks rows without keys by a finite number.

    Args:
        out, lse: a state of this library.
        value, base2, heads_last: as in :func:`from_sentinel`.

    Returns:
        (out, lse).

    Raises:
        ValueError, TypeError: as :func:`from_sentinel`.
    """
    check_state(out, lse)
    _check_sentinel(value, lse.dtype)
    scaled = lse_to_base2(lse) if base2 else lse
    return out, _heads_last(torch.where(lse == NEG_INF, value, scaled), heads_last)


def lse_from_base2(lse):
    """Logarithms in base 2 -> natural ones, in any layout; -inf and its gradient of 0 stay."""
    return torch.where(lse == NEG_INF, NEG_INF, lse * LN_2)


def lse_to_base2(lse):
    """Natural logarithms -> base 2, in any layout; -inf and its gradient of 0 stay."""
    return torch.where(lse == NEG_INF, NEG_INF, lse / LN_2)


def lse_from_padded(lse, cu_seqlens, total):
    """(batch, heads, max_seqlen), each sequence from the start of its row -> (heads, total).

    Rows of no sequence (from ``cu_seqlens[-1]`` on) become -inf (P6); rows of a sequence that is
    longer than max_seqlen, of which nothing is known, NaN.

    Args:
        lse: (batch, heads, max_seqlen).
        cu_seqlens: (batch + 1) int32 on the device of lse.
        total: number of rows of the packed tensors.

    Returns:
        (heads, total). Differentiable.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: something that is no tensor, or cu_seqlens of another dtype.
    """
    check_tensors(lse=lse, cu_seqlens=cu_seqlens)
    if lse.dim() != 3:
        raise ValueError(f"lse: got {lse.dim()} dimensions; accepted is (batch, heads, max_seqlen)")
    batch, heads, max_seqlen = lse.shape
    _check_cu_seqlens(cu_seqlens, lse, batch)
    if batch == 0:
        return lse.new_full((heads, total), NEG_INF)
    lse = torch.nn.functional.pad(lse, (0, 1), value=NAN)  # one more, for all that are not there
    row = torch.arange(total, dtype=cu_seqlens.dtype, device=lse.device)
    sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
    in_sequence = sequence.clamp(max=batch - 1)
    position = row - cu_seqlens[in_sequence]
    values = lse[in_sequence, :, position.clamp(max=max_seqlen)].T
    return torch.where(sequence < batch, values, NEG_INF).contiguous()


def lse_to_padded(lse, cu_seqlens, max_seqlen):
    """(heads, total) -> (batch, heads, max_seqlen), -inf behind the end of each sequence.

    Args:
        lse: (heads, total).
        cu_seqlens: (batch + 1) int32 on the device of lse.
        max_seqlen: an upper bound of the sequences' lengths.

    Returns:
        (batch, heads, max_seqlen). Differentiable.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: something that is no tensor, or cu_seqlens of another dtype.
    """
    check_tensors(lse=lse, cu_seqlens=cu_seqlens)
    if lse.dim() != 2:
        raise ValueError(f"lse: got {lse.dim()} dimensions; accepted is (heads, total)")
    heads, total = lse.shape
    batch = max(0, cu_seqlens.numel() - 1)
    _check_cu_seqlens(cu_seqlens, lse, batch)
    if total == 0:
        return lse.new_full((batch, heads, max_seqlen), NEG_INF)
    position = torch.arange(max_seqlen, device=lse.device)
    row = cu_seqlens[:-1, None] + position
    values = lse[:, row.clamp(max=total - 1)].transpose(0, 1)
    inside = (row < cu_seqlens[1:, None]).unsqueeze(1)
    return torch.where(inside, values, NEG_INF).contiguous()


def _marks_to_empty(out, lse):
    """`lse` with +inf made -inf where out is exactly 0, else NaN."""
    is_zero = (out == 0).all(-1).transpose(-1, -2)
    # The -inf that are there already are selected too, so that their gradient is 0.
    lse = torch.where((lse == NEG_INF) | ((lse == INF) & is_zero), NEG_INF, lse)
    return torch.where(lse == INF, NAN, lse)


def _state(out, lse, empty, base2):
    """The state with these rows empty; elsewhere no infinity is left."""
    natural = lse_from_base2(lse) if base2 else lse
    natural = torch.where(lse == INF, NAN, natural)
    return _without_payload(out, empty), torch.where(empty, NEG_INF, natural)


def _without_payload(out, empty):
    """`out` with 0 in these rows: beside an infinity it is what tells them from NaN."""
    return torch.where(empty.transpose(-1, -2).unsqueeze(-1), 0, out)


def _with_sink(lse, sink):
    """ln(exp(lse) + exp(sink)), with exact zeros for the gradient of what is -inf."""
    check_tensors(attn_sink=sink)
    if sink.shape != lse.shape[-2:-1] or sink.device != lse.device:
        raise ValueError(
            f"attn_sink: got shape {tuple(sink.shape)} on {sink.device}; accepted is "
            f"{tuple(lse.shape[-2:-1])} on {lse.device}"
        )
    sink = torch.where(sink == NEG_INF, NEG_INF, sink)
    sink = torch.where(sink == INF, NAN, sink)
    sink = sink.to(lse.dtype).unsqueeze(-1)
    empty = lse == NEG_INF
    both = torch.logaddexp(torch.where(empty, 0, lse), sink)
    return torch.where(empty, sink, both)


def _heads_first(lse, heads_last):
    return lse.transpose(-1, -2).contiguous() if heads_last else lse


_heads_last = _heads_first  # the exchange of the last two axes is its own inverse


def _check_packed(out):
    if out.dim() != 3:
        raise ValueError(f"out: got {out.dim()} dimensions; accepted is (total, heads, head_dim)")


def _check_sentinel(value, dtype):
    if not (isinstance(value, int | float) and abs(value) <= torch.finfo(dtype).max):
        raise ValueError(
            f"value: got {value}; accepted is a finite number of {dtype} (an infinity has "
            "converters of its own, such as from_fa2)"
        )


def _check_cu_seqlens(cu_seqlens, lse, batch):
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: got dtype {cu_seqlens.dtype}; accepted is torch.int32")
    if cu_seqlens.shape != (batch + 1,):
        raise ValueError(
            f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}; accepted is ({batch + 1},)"
        )
    if cu_seqlens.device != lse.device:
        raise ValueError(
            f"cu_seqlens: got device {cu_seqlens.device}; accepted is that of lse, {lse.device}"
        )
