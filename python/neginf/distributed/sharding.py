"""How sequences lie on the ranks, as users hold it, and moving tensors there and back."""

import weakref

import torch

from neginf._checks import check_ints, check_no_gradient, check_tensors
from neginf.distributed import tokens
from neginf.distributed.calls import to_device
from neginf.distributed.communication import process_group
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
        group = process_group(group)
        # Not kept alive: a process that still has a gloo group when it ends may abort.
        self._group = weakref.ref(group)
        self.rank, self.size = group.rank(), group.size()
        self.placement = Placement(self.lengths, self.size, placement)
        self.kept = {}  # what depends on it alone, and on devices: by kind and arguments

    @property
    def group(self):
        """The ProcessGroup."""
        group = self._group()
        if group is None:
            raise ValueError("group: got one that has been destroyed; accepted is one in use")
        return group

    @property
    def num_tokens(self):
        """Rows of this rank's tensors: of each sequence of a dense batch, or of all packed ones."""
        return self.placement.num_tokens(self.rank)

    def local_lengths(self):
        """A list: how many tokens of each sequence this rank has. Of one number if dense."""
        lengths = [0] * len(self.lengths)
        for segment in self.placement.segments(self.rank):
            lengths[segment.sequence] += segment.length
        return lengths

    def positions(self, device=None):
        """(num_tokens) int64: the position of each of this rank's tokens in its sequence."""
        segments = self.placement.segments(self.rank)
        positions = tokens.chain(range(s.start, s.start + s.length) for s in segments)
        return to_device(positions, torch.device("cpu" if device is None else device))

    def shard(self, tensor, dim=None):
        """This rank's part of a tensor of whole sequences. No communication; differentiable.

        Args:
            tensor: (batch, seqlen, ...), or (total, ...) of packed sequences.
            dim: where the tokens are, if not in dimension 1, or 0 of packed ones: -1 for lse.

        Returns:
            (batch, num_tokens, ...) or (num_tokens, ...); a copy.

        Raises:
            ValueError: another number of tokens; a dim that the tensor lacks.
            TypeError: something that is no tensor; a dim that is no int.
        """
        dim = self._token_dim(tensor, dim)
        tokens.check_count("tensor", tensor, dim, sum(self.lengths))
        return tensor.index_select(dim, tokens.rows_of_rank(self, tensor.device))

    def unshard(self, tensor, dim=None):
        """The tensor of whole sequences, on every rank, from each rank's part. One all-gather.

        Args:
            tensor: this rank's part, as :meth:`shard` returns it.
            dim: as in :meth:`shard`.

        Returns:
            (batch, seqlen, ...) or (total, ...).

        Raises:
            ValueError: another number of tokens; a tensor that needs a gradient while gradients are
                recorded, which could mean a sum over ranks or not. Otherwise as :meth:`shard`.
            TypeError: as :meth:`shard`.
        """
        dim = self._token_dim(tensor, dim)
        tokens.check_count("tensor", tensor, dim, self.num_tokens)
        check_no_gradient(tensor=tensor)
        return tokens.gather(self, tokens.padded(self, tensor, dim), dim).contiguous()

    def _token_dim(self, tensor, dim):
        check_tensors(tensor=tensor)
        if dim is None:
            dim = 0 if self.is_packed else 1
        (dim,) = check_ints("dim", dim, (dim,), "an int or None")
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"dim: got {dim}; accepted is a dimension of {tuple(tensor.shape)}")
        return dim % tensor.dim()


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
