"""Which tokens of which sequence each rank has. Numbers only: no tensors, no communication."""

import functools
import itertools
from dataclasses import dataclass
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

    @functools.lru_cache(maxsize=4096)  # noqa: B019, a placement is equal to all others like it
    def segments(self, rank):
        """In the order of the rank's tensor: sequence by sequence, and by position."""
        if self.kind == "zigzag":
            count, chunks = 2 * self.size, (rank, 2 * self.size - 1 - rank)
        else:
            count, chunks = self.size, (rank,)
        segments, offset = [], 0
        for sequence, length in enumerate(self.lengths):
            for chunk in chunks:
                start, end = length * chunk // count, length * (chunk + 1) // count
                if start < end:
                    segments.append(Segment(sequence, start, offset, end - start))
                    offset += end - start
        return tuple(segments)

    def num_tokens(self, rank):
        return sum(segment.length for segment in self.segments(rank))

    def most_tokens(self):
        return max(self.num_tokens(rank) for rank in range(self.size))

    def gathered(self):
        """The placement of all sequences in one tensor, one after the other."""
        return Placement(self.lengths, 1, "contiguous")

    def tokens(self, rank):
        """The rows that the rank's tokens have in the gathered tensor."""
        starts = [0, *itertools.accumulate(self.lengths)]
        for segment in self.segments(rank):
            first = starts[segment.sequence] + segment.start
            yield range(first, first + segment.length)
