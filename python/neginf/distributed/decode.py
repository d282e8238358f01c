"""Decoding over a KV cache that is spread over ranks: each attends to its own part, and the states
are merged. Ranks may have no key at all: theirs is the state (0, -inf)."""

import torch

from neginf._checks import check_no_gradient, check_state, check_tensors
from neginf.attention import flash_attn_func
from neginf.distributed.communication import all_gather, all_to_all, process_group, reduce_scatter
from neginf.distributed.local import merge_sink
from neginf.merge import NEG_INF, check_sink, flash_attn_combine


def decode_attention(
    q,
    k,
    v,
    group=None,
    *,
    seqused_k=None,
    softmax_scale=None,
    softcap=0.0,
    sink=None,
    method="reduce_scatter",
    return_lse=False,
):
    """Attention of new tokens over a KV cache whose tokens are spread over ranks, in any order.

    The same as :func:`neginf.flash_attn_func` over the tokens of all ranks, of which every rank
    gets the heads that are its share (decode context parallelism). Every row sees all of them.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), the same on every rank; num_heads is divisible by
            the number of ranks.
        k: (batch, capacity, num_heads_k, head_dim), this rank's part of the cache. Capacities may
            differ, and may be 0.
        v: as k, or of a smaller head_dim, the same on every rank.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks.
        seqused_k: (batch) int32, how many tokens of each sequence this rank has; None is all. On
            the device of q, where nobody waits for it.
        softmax_scale, softcap: as in :func:`neginf.flash_attn_func`.
        sink: (num_heads), the same on every rank; counted once.
        method: as in :func:`merge_over_ranks`.
        return_lse: return ``(out, lse)``.

    Returns:
        out, (batch, seqlen_q, num_heads / ranks, head_dim of v): rank r has the r-th share of the
        heads.
        With ``return_lse`` also lse, (batch, num_heads / ranks, seqlen_q), natural logarithm.

    Raises:
        ValueError: q, k or v that needs a gradient while gradients are recorded, for it has none.
            Otherwise as :func:`neginf.flash_attn_func` and :func:`merge_over_ranks`.
        TypeError: as these two.
    """
    check_tensors(q=q, k=k, v=v)
    check_no_gradient(q=q, k=k, v=v)
    if q.dim() != 4:
        raise ValueError(
            f"q: got {q.dim()} dimensions; accepted are 4, (batch, seqlen, heads, head_dim)"
        )
    group = process_group(group)
    _check("q", q, group, sink, method)
    state = flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, softcap=softcap, seqused_k=seqused_k, return_lse=True
    )
    out, lse = merge_over_ranks(*state, group, sink=sink, method=method)
    return (out, lse) if return_lse else out


def merge_over_ranks(out, lse, group=None, *, sink=None, method="reduce_scatter"):
    """Merges the states that the ranks have of the same rows, over disjoint keys, and gives each
    rank its share of the heads.

    Args:
        out: (batch, seqlen, heads, head_dim) or (total, heads, head_dim), this rank's; heads is
            divisible by the number of ranks.
        lse: (batch, heads, seqlen) or (heads, total), float32 (float64 with float64), natural
            logarithm.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks.
        sink: (heads), as in :func:`neginf.apply_sink`, but +inf gives NaN on every device, as in
            :func:`neginf.flash_attn_func`; the same on every rank, counted once.
        method: "reduce_scatter": one all-gather of lse and one reduce-scatter of out, each rank's
            weighted in float32 (float64). "all_to_all": out and lse of a share go to its rank as
            they are: half as many bytes of bfloat16 out, and the sum is in the order of the ranks.

    Returns:
        (out, lse) of this rank's heads / ranks heads, shaped and typed otherwise as given.

    Raises:
        ValueError: heads that are not divisible; another method; tensors that need a gradient while
            gradients are recorded, for it has none; on the CPU also +inf in lse, said by the ranks
            that receive it: all of them, or with "all_to_all" those whose heads have it. Otherwise
            as :func:`neginf.merge_states`.
        TypeError: as :func:`neginf.merge_states`; a group that is none; a method that is no str.

    Source: the merge is section 5 of docs/contract.md.
    """
    check_state(out, lse)
    check_no_gradient(out=out, lse=lse)
    group = process_group(group)
    _check("out", out, group, sink, method)
    out, lse = METHODS[method](out, lse, group)
    if sink is None:
        return out, lse
    return merge_sink(out, lse, sink.chunk(group.size())[group.rank()])


def _check(name, tensor, group, sink, method):
    """tensor: q or out."""
    heads, head_dim = tensor.shape[-2:]
    if heads % group.size() != 0:
        raise ValueError(
            f"{name}: got {heads} heads; accepted is a multiple of the number of ranks, "
            f"{group.size()}"
        )
    if head_dim == 0:
        raise ValueError(f"{name}: got head_dim 0; accepted is 1 or more")
    if sink is not None:
        check_sink(sink, tensor)
    if not isinstance(method, str):
        raise TypeError(f"method: got {method!r}; accepted are {tuple(METHODS)}")
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}; accepted are {tuple(METHODS)}")


def _check_received(lses):
    """On the CPU; on a GPU this would wait for it, and +inf makes its row NaN. Not before the
    messages: the other ranks, whose lse may be right, would wait for this one."""
    if lses.device.type == "cpu" and lses.isposinf().any():
        raise ValueError(
            "lse: got +inf on some rank; accepted are finite values, NaN, and -inf for a row "
            "without keys. For states of libraries that mark such rows by +inf there is "
            "neginf.convert"
        )


def _by_reduce_scatter(out, lse, group):
    lses = all_gather(lse, group)
    _check_received(lses)
    # The weight of a state in a merge is what comes of payloads that are 1 in it and 0 elsewhere.
    is_mine = torch.arange(group.size(), device=lse.device) == group.rank()
    payload = is_mine.to(lse.dtype).view(-1, *[1] * out.dim())
    weight, merged_lse = flash_attn_combine(payload.expand(-1, *out.shape[:-1], 1), lses)
    is_empty = (lse == NEG_INF).transpose(-1, -2).unsqueeze(-1)
    weighted = torch.where(is_empty, 0, out.to(lse.dtype) * weight)
    merged = reduce_scatter(_shares(weighted, group), group)
    return merged.to(out.dtype), _shares(merged_lse, group)[group.rank()]


def _by_all_to_all(out, lse, group):
    outs, lses = (all_to_all(_shares(t, group), group) for t in (out, lse))
    _check_received(lses)
    return flash_attn_combine(outs, lses)


METHODS = {"reduce_scatter": _by_reduce_scatter, "all_to_all": _by_all_to_all}


def _shares(tensor, group):
    """(ranks, ...): the heads, in the last dimension but one, dealt to the ranks."""
    size = group.size()
    return tensor.unflatten(-2, (size, tensor.shape[-2] // size)).movedim(-3, 0).contiguous()
