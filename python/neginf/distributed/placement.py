"""Which tokens of which sequence each rank has. Numbers only: no tensors, no communication."""

import functools
import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

PLACEMENTS = ("zigzag", "contiguous")


class Segment(NamedTuple):
    """Consecutive tokens of one sequence."""

    sequence: int
    start: int  # the first one's position in the sequence
    offset: int  # its row in the rank's tensor
    length: int


@dataclass(frozen=True)
class Placement:
    """Sequences of `lengths` tokens, cut into chunks and dealt to `size` ranks.

    contiguous  size chunks, one for each rank.
    zigzag      2 * size chunks; rank r has the r-th from the start and the r-th from the end. Under
                a causal mask all ranks then have the same amount of work.

    The chunks of a sequence differ by one token at most, and are empty where there are too few.
    """

    lengths: tuple
    size: int
    kind: str
    _segments: dict = field(default_factory=dict, repr=False, compare=False)  # of each rank

    def segments(self, rank):
        """In the order of the rank's tensor: sequence by sequence, and by position."""
        if rank not in self._segments:
            self._segments[rank] = tuple(self._make_segments(rank))
        return self._segments[rank]

    def _make_segments(self, rank):
        if self.kind == "zigzag":
            count, chunks = 2 * self.size, (rank, 2 * self.size - 1 - rank)
        else:
            count, chunks = self.size, (rank,)
        offset = 0
        for sequence, length in enumerate(self.lengths):
            for chunk in chunks:
                start, end = length * chunk // count, length * (chunk + 1) // count
                if start < end:
                    yield Segment(sequence, start, offset, end - start)
                    offset += end - start

    def num_tokens(self, rank):
        return sum(segment.length for segment in self.segments(rank))

    @functools.cached_property
    def most_tokens(self):
        return max(self.num_tokens(rank) for rank in range(self.size))

    @functools.cached_property
    def gathered(self):
        """The placement of all sequences in one tensor, one after the other."""
        return Placement(self.lengths, 1, "contiguous")

    def tokens(self, segment):
        """The rows that its tokens have in the gathered tensor."""
        first = self._starts[segment.sequence] + segment.start
        return range(first, first + segment.length)

    @functools.cached_property
    def _starts(self):
        return [0, *itertools.accumulate(self.lengths)]
