"""Attention from its definition, over the full score matrix, in plain torch on the CPU.

In float64 it is what every result is judged against. With ``compute=torch.bfloat16`` and the like
it is the same maths in low precision, which says how much error that precision costs. It is
differentiable; a row that sees no key is left out by selection, so its gradients are exact zeros.
"""

import itertools
import math

import torch

NEG_INF = float("-inf")
NAN = float("nan")


def visible(seqlen_q, seqlen_k, causal=False, window_size=(-1, -1)):
    """(seqlen_q, seqlen_k) bool: which keys does each row see."""
    left, right = window_size[0], 0 if causal else window_size[1]
    diagonal = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)[None, :]
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        mask &= key >= diagonal - left
    if right >= 0:
        mask &= key <= diagonal + right
    return mask


def product(a, b):
    """a @ b, summed in float32 at least and rounded once: what torch does, and does slowly here."""
    sums = torch.promote_types(a.dtype, torch.float32)
    return (a.to(sums) @ b.to(sums)).to(a.dtype)


def sequence_state(q, k, v, mask, scale, softcap, slopes, sink, softmax_dtype):
    """One sequence: q (sq, h, d), k (sk, hk, d), v (sk, hk, dv) -> out (sq, h, dv), lse (h, sq)."""
    sq, heads, _ = q.shape
    sk, heads_k, _ = k.shape
    q = torch.where(mask.any(1)[:, None, None], q, 0)
    seen = mask.any(0)[:, None, None]
    k = torch.where(seen, k, 0).repeat_interleave(heads // heads_k, dim=1)
    v = torch.where(seen, v, 0).repeat_interleave(heads // heads_k, dim=1)

    scores = product(q.transpose(0, 1), k.permute(1, 2, 0)) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.to(softmax_dtype)
    if slopes is not None:
        distance = torch.arange(sq)[:, None] + sk - sq - torch.arange(sk)[None, :]
        scores = scores - slopes[:, None, None].to(softmax_dtype) * distance.abs()
    scores = torch.where(mask, scores, NEG_INF)

    # The sink is one more key, whose value is zero.
    if sink is None:
        sink = torch.full((heads,), NEG_INF)
    sink_scores = sink.to(softmax_dtype)[:, None, None].expand(heads, sq, 1)
    with_sink = torch.cat([scores, sink_scores], dim=-1)

    largest = with_sink.detach().amax(-1, keepdim=True)
    shift = torch.where(largest == NEG_INF, 0, largest)
    weights = torch.exp(with_sink - shift)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1, total)
    lse = torch.where(empty, NEG_INF, shift + torch.log(total)).squeeze(-1)

    out = product((weights[..., :-1] / total).to(v.dtype), v.transpose(0, 1))
    out = torch.where(mask.any(1)[:, None], out, 0)
    out = torch.where(lse.isnan()[..., None], NAN, out)
    return out.transpose(0, 1), lse


def sequences(seqlens, cu_seqlens, seqused):
    """(begin, length in use) of every sequence. seqlens: (batch, rows) of a dense tensor."""
    if cu_seqlens is None:
        begins, lengths = [0] * seqlens[0], [seqlens[1]] * seqlens[0]
    else:
        ends = cu_seqlens.tolist()
        begins, lengths = ends[:-1], [b - a for a, b in itertools.pairwise(ends)]
    if seqused is not None:
        lengths = seqused.tolist()
    return list(zip(begins, lengths, strict=True))


def where_used(q, k, **options):
    """Rows of q that see a key, and rows of k that are seen: bool, without the last two dims."""
    dense = q.dim() == 4
    used_q = torch.zeros(q.shape[:-2], dtype=torch.bool)
    used_k = torch.zeros(k.shape[:-2], dtype=torch.bool)
    for b, (rows, keys) in enumerate(_slices(q, k, options)):
        mask = visible(
            rows.stop - rows.start,
            keys.stop - keys.start,
            options.get("causal", False),
            options.get("window_size", (-1, -1)),
        )
        (used_q[b] if dense else used_q)[rows] = mask.any(1)
        (used_k[b] if dense else used_k)[keys] = mask.any(0)
    return used_q, used_k


def _slices(q, k, options):
    queries = sequences(q.shape[:2], options.get("cu_seqlens_q"), options.get("seqused_q"))
    keys = sequences(k.shape[:2], options.get("cu_seqlens_k"), options.get("seqused_k"))
    return [
        (slice(a, a + m), slice(b, b + n)) for (a, m), (b, n) in zip(queries, keys, strict=True)
    ]


def attention(
    q,
    k,
    v,
    *,
    compute=torch.float64,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    sink=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
):
    """(out, lse) in `compute`; dense without cu_seqlens, else packed. Layouts as the library's."""
    softmax_dtype = torch.promote_types(compute, torch.float32)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = (t.to(compute) for t in (q, k, v))
    dense = q.dim() == 4
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    if dense:
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), NEG_INF, dtype=softmax_dtype)
    else:
        lse = torch.full((q.shape[1], q.shape[0]), NEG_INF, dtype=softmax_dtype)
    slices = _slices(
        q,
        k,
        {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "seqused_q": seqused_q,
            "seqused_k": seqused_k,
        },
    )
    for b, (rows, keys) in enumerate(slices):
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        q_index, k_index = ((b, rows), (b, keys)) if dense else (rows, keys)
        mask = visible(rows.stop - rows.start, keys.stop - keys.start, causal, window_size)
        o, state_lse = sequence_state(
            q[q_index], k[k_index], v[k_index], mask, scale, softcap, slopes, sink, softmax_dtype
        )
        out[q_index] = o
        lse[(b, slice(None), rows) if dense else (slice(None), rows)] = state_lse
    return out, lse


def merge(outs, lses, compute=torch.float64):
    """The merge of states that lie along dimension 0."""
    outs, lses = outs.to(compute), lses.to(torch.promote_types(compute, torch.float32))
    lses = torch.where(lses == math.inf, NAN, lses)
    if outs.shape[0] == 0:
        return outs.new_zeros(outs.shape[1:]), lses.new_full(lses.shape[1:], NEG_INF)
    largest = lses.detach().amax(0)
    shift = torch.where(largest == NEG_INF, 0, largest)
    weights = torch.exp(lses - shift)
    total = weights.sum(0)
    empty = total == 0
    total = torch.where(empty, 1, total)
    lse = torch.where(empty, NEG_INF, shift + torch.log(total))
    shares = (weights / total).transpose(-1, -2).unsqueeze(-1)
    present = (lses != NEG_INF).transpose(-1, -2).unsqueeze(-1)
    out = (torch.where(present, outs, 0) * torch.where(present, shares, 0)).sum(0)
    nan_row = lse.isnan().transpose(-1, -2).unsqueeze(-1)
    return torch.where(nan_row, NAN, out), lse
