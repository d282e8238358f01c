"""How sequences lie on the ranks, as users hold it, and moving tensors there and back."""

import itertools

import torch

from neginf._checks import check_no_gradient, check_tensors
from neginf.distributed.calls import to_device
from neginf.distributed.communication import all_gather, process_group, reduce_scatter
from neginf.distributed.placement import PLACEMENTS, Placement


class SequenceSharding:
    """Which tokens of which sequence this rank has.

    Made once for a batch, from lengths that the host knows, and given to every layer: it decides
    which blocks of keys meet which rows, so that no call waits for the device.

    Args:
        lengths: int, the length of all sequences of a dense batch, whose tensors are (batch,
            seqlen, ...); or a sequence of ints, those of packed sequences, (total, ...). Need not
            be divisible by anything, and may be 0.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks.
        placement: "zigzag": each sequence is cut into 2 * size chunks, and rank r has the chunks r
            and 2 * size - 1 - r, by which causal work is even. "contiguous": size chunks, one for
            each rank.

    Raises:
        ValueError: negative lengths, another placement, a group that this rank does not belong to.
        TypeError: lengths that are no ints, such as a tensor; a group that is none.

    Source of the zigzag order: Brandon et al., Striped Attention (2023), on the balance that causal
    ring attention needs.
    """

    def __init__(self, lengths, group=None, placement="zigzag"):
        self.is_packed = not _is_int(lengths)
        self.lengths = _checked_lengths(lengths)
        if placement not in PLACEMENTS:
            raise ValueError(f"placement: got {placement!r}; accepted are {PLACEMENTS}")
        self.group = process_group(group)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.placement = Placement(self.lengths, self.size, placement)
        self._rows = {}

    @property
    def num_tokens(self):
        """Rows of this rank's tensors: of each sequence of a dense batch, or of all packed ones."""
        return self.placement.num_tokens(self.rank)

    def local_lengths(self):
        """How many tokens of each sequence this rank has; one number for a dense batch."""
        lengths = [0] * len(self.lengths)
        for segment in self.placement.segments(self.rank):
            lengths[segment.sequence] += segment.length
        return lengths

    def positions(self, device=None):
        """(num_tokens) int64: the position of each of this rank's tokens in its sequence."""
        positions = [
            range(segment.start, segment.start + segment.length)
            for segment in self.placement.segments(self.rank)
        ]
        return to_device(
            list(itertools.chain(*positions)), torch.int64, torch.device(device or "cpu")
        )

    def shard(self, tensor, dim=None):
        """This rank's part of a tensor of whole sequences. No communication; differentiable.

        Args:
            tensor: (batch, seqlen, ...), or (total, ...) of packed sequences.
            dim: where the tokens are, if not in dimension 1, or 0 of packed ones: -1 for lse.

        Returns:
            (batch, num_tokens, ...) or (num_tokens, ...); a copy.
        """
        dim = self._token_dim(tensor, dim)
        self._check_tokens("tensor", tensor, dim, sum(self.lengths))
        key = "shard", tensor.device
        if key not in self._rows:
            rows = list(itertools.chain(*self.placement.tokens(self.rank)))
            self._rows[key] = to_device(rows, torch.int64, tensor.device)
        return tensor.index_select(dim, self._rows[key])

    def unshard(self, tensor, dim=None):
        """The tensor of whole sequences, on every rank, from each rank's part. One all-gather.

        Args:
            tensor: this rank's part, as :meth:`shard` returns it.
            dim: as in :meth:`shard`.

        Returns:
            (batch, seqlen, ...) or (total, ...).

        Raises:
            ValueError: another number of tokens; a tensor that needs a gradient while gradients are
                recorded, which could mean a sum over ranks or not.
        """
        dim = self._token_dim(tensor, dim)
        self.check_local("tensor", tensor, dim)
        check_no_gradient(tensor=tensor)
        return self.gather(self.padded(tensor, dim), dim).contiguous()

    def check_local(self, name, tensor, dim):
        self._check_tokens(name, tensor, dim, self.num_tokens)

    def padded(self, tensor, dim):
        """With as many rows as the rank with most tokens has, contiguous: messages have one size.
        Nobody uses rows past a rank's own."""
        shape = list(tensor.shape)
        shape[dim] = self.placement.most_tokens()
        if shape[dim] == self.num_tokens:
            return tensor.contiguous()
        padded = tensor.new_empty(shape)
        self.unpadded(padded, dim).copy_(tensor)
        return padded

    def unpadded(self, tensor, dim):
        return tensor.narrow(dim, 0, self.num_tokens)

    def gather(self, padded, dim):
        """All tokens in the order of their sequences, in any strides."""
        gathered = _tokens_first(all_gather(padded, self.group), dim)
        return gathered[self._gathered_rows(padded.device)].movedim(0, dim)

    def scatter_sum(self, tensor, dim):
        """The reverse: this rank's tokens, padded, summed over the ranks' tensors of all tokens."""
        shape = [self.size, *tensor.shape]
        shape[dim + 1] = self.placement.most_tokens()
        parts = tensor.new_zeros(shape)
        _tokens_first(parts, dim)[self._gathered_rows(tensor.device)] = tensor.movedim(dim, 0)
        return reduce_scatter(parts, self.group)

    def _gathered_rows(self, device):
        """(ranks, rows of these ranks) where the tokens of all sequences are, in their order."""
        if device not in self._rows:
            place = [None] * sum(self.lengths)
            for rank in range(self.size):
                tokens = itertools.chain(*self.placement.tokens(rank))
                for row, token in enumerate(tokens):
                    place[token] = rank, row
            ranks, rows = zip(*place, strict=True) if place else ((), ())
            self._rows[device] = tuple(to_device(x, torch.int64, device) for x in (ranks, rows))
        return self._rows[device]

    def _token_dim(self, tensor, dim):
        check_tensors(tensor=tensor)
        if dim is None:
            dim = 0 if self.is_packed else 1
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"dim: got {dim}; accepted is a dimension of {tuple(tensor.shape)}")
        return dim % tensor.dim()

    def _check_tokens(self, name, tensor, dim, tokens):
        if tensor.shape[dim] != tokens:
            raise ValueError(
                f"{name}: got {tensor.shape[dim]} tokens in dimension {dim} of shape "
                f"{tuple(tensor.shape)}; accepted are {tokens}"
            )


def _tokens_first(tensors, dim):
    """A view (size, tokens, ...) of (size, ...) whose tokens are in dimension dim + 1."""
    return tensors.movedim(dim + 1, 1)


def _is_int(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _checked_lengths(lengths):
    accepted = "accepted is an int (a dense batch) or a sequence of ints (packed sequences)"
    if _is_int(lengths):
        checked = (lengths,)
    elif isinstance(lengths, (list, tuple)):
        checked = tuple(lengths)
    else:
        raise TypeError(f"lengths: got {type(lengths).__name__}; {accepted}")
    for length in checked:
        if not _is_int(length):
            raise TypeError(f"lengths: got a {type(length).__name__} in it; {accepted}")
        if length < 0:
            raise ValueError(f"lengths: got {length}; accepted are lengths of 0 or more")
    return checked
