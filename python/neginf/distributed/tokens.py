"""Moving the tokens of tensors between ranks, as a SequenceSharding has them lie.

`dim`, where the tokens are, counts from the front.
"""

import torch

from neginf.distributed.calls import Kept
from neginf.distributed.communication import all_gather, reduce_scatter


def check_count(name, tensor, dim, count):
    if tensor.shape[dim] != count:
        raise ValueError(
            f"{name}: got {tensor.shape[dim]} tokens in dimension {dim} of shape "
            f"{tuple(tensor.shape)}; accepted are {count}"
        )


def padded(sharding, tensor, dim):
    """With as many rows as the rank with most tokens has, contiguous: messages have one size.
    Nobody uses rows past a rank's own."""
    shape = list(tensor.shape)
    shape[dim] = sharding.placement.most_tokens
    if shape[dim] == sharding.num_tokens:
        return tensor.contiguous()
    result = tensor.new_empty(shape)
    unpadded(sharding, result, dim).copy_(tensor)
    return result


def unpadded(sharding, tensor, dim):
    return tensor.narrow(dim, 0, sharding.num_tokens)


def gather(sharding, tensor, dim):
    """All tokens in the order of their sequences, from the padded tensors of all ranks; in any
    strides."""
    gathered = _tokens_first(all_gather(tensor, sharding.group), dim)
    return gathered[_rows_of_all(sharding, tensor.device)].movedim(0, dim)


def scatter_sum(sharding, tensor, dim):
    """The reverse: this rank's tokens, padded, summed over the ranks' tensors of all tokens."""
    shape = [sharding.size, *tensor.shape]
    shape[dim + 1] = sharding.placement.most_tokens
    parts = tensor.new_zeros(shape)
    _tokens_first(parts, dim)[_rows_of_all(sharding, tensor.device)] = tensor.movedim(dim, 0)
    return reduce_scatter(parts, sharding.group)


def rows_of_rank(sharding, device):
    """The rows that this rank's tokens have among all."""
    key = "rank", device
    if key not in sharding.kept:
        segments = sharding.placement.segments(sharding.rank)
        rows = chain(sharding.placement.tokens(segment) for segment in segments)
        sharding.kept[key] = Kept([rows], device)
    (rows,) = sharding.kept[key].on_current_stream()
    return rows


def _rows_of_all(sharding, device):
    """(ranks, rows of these ranks) where the tokens of all sequences are, in their order."""
    key = "all", device
    if key not in sharding.kept:
        placement = sharding.placement
        placed = sorted(
            (placement.tokens(segment).start, rank, segment)
            for rank in range(sharding.size)
            for segment in placement.segments(rank)
        )
        lengths = torch.tensor([segment.length for *_, segment in placed], dtype=torch.int64)
        ranks = torch.tensor([rank for _, rank, _ in placed], dtype=torch.int64)
        rows = chain(range(s.offset, s.offset + s.length) for *_, s in placed)
        indices = ranks.repeat_interleave(lengths), rows
        sharding.kept[key] = Kept(indices, device)
    return sharding.kept[key].on_current_stream()


def chain(ranges):
    """int64: the numbers of all ranges, one after the other."""
    empty = torch.empty(0, dtype=torch.int64)
    return torch.cat([empty, *(torch.arange(r.start, r.stop) for r in ranges)])


def _tokens_first(tensors, dim):
    """A view (size, tokens, ...) of (size, ...) whose tokens are in dimension dim + 1."""
    return tensors.movedim(dim + 1, 1)
