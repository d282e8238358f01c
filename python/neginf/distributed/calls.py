"""Attention between the rows of one rank and the keys of another, as calls of the kernels.

The mask of the whole, seen from two pieces of it, is a band whose diagonal lies anywhere:

    row i of a segment sees key j of another iff  i + shift - left <= j <= i + shift + right

The kernels align theirs to the last row and the last key. What no row sees is cut off the end of
the keys, and what sees no key off the end of the rows; then a window of non-negative sides is left:

    row i sees key j iff  i + keys - rows - left' <= j <= i + keys - rows + right'

So every mask is exact, whatever the lengths, and what cannot be seen costs nothing.
"""

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Block(NamedTuple):
    """Rows and keys of two tensors, and the window_size that the kernels take for them."""

    row: int
    rows: int
    key: int
    keys: int
    left: int  # -1: unbounded
    right: int

    @property
    def is_full(self):
        return self.window == (-1, -1)

    @property
    def window(self):
        return self.left, self.right

    @property
    def end_row(self):
        return self.row + self.rows

    @property
    def end_key(self):
        return self.key + self.keys


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the kernels for one block, or for several with the same window."""

    row: int  # what the kernels get of the tensors: the blocks and what lies between them
    rows: int
    key: int
    keys: int
    left: int
    right: int
    blocks: tuple | None  # None: one block of a dense batch

    _varlen_arguments: dict = field(default_factory=dict)  # on each device

    def varlen_arguments(self, device):
        """cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k."""
        if self.blocks is None:
            return (None,) * 6
        if device not in self._varlen_arguments:
            self._varlen_arguments[device] = self._make_varlen_arguments(device)
        tensors, lengths = self._varlen_arguments[device]
        return (*tensors.on_current_stream(), *lengths)

    def _make_varlen_arguments(self, device):
        rows, keys = [b.rows for b in self.blocks], [b.keys for b in self.blocks]
        cu_seqlens_q = [*(b.row - self.row for b in self.blocks), self.rows]
        cu_seqlens_k = [*(b.key - self.key for b in self.blocks), self.keys]
        lists = (cu_seqlens_q, cu_seqlens_k, rows, keys)
        tensors = Kept([torch.tensor(numbers, dtype=torch.int32) for numbers in lists], device)
        return tensors, (_largest_step(cu_seqlens_q), _largest_step(cu_seqlens_k))


def _largest_step(cu_seqlens):
    return max(b - a for a, b in itertools.pairwise(cu_seqlens))


def to_device(tensor, device):
    """Without waiting for the device."""
    with torch.inference_mode(False):  # it is kept, and may be needed for a backward later
        if device.type != "cuda":
            return tensor.clone()
        return tensor.pin_memory().to(device, non_blocking=True)


class Kept:
    """Tensors copied to a device once, and used from any of its streams.

    torch leaves it to users to order the streams on which they use one tensor. Of these they know
    nothing, and one sharding may well serve layers on several streams: so another stream than that
    of the copy waits for it there, on the device, and is made known to the allocator, which would
    otherwise reuse their memory without regard to it.
    """

    def __init__(self, tensors, device):
        self.tensors = tuple(to_device(tensor, device) for tensor in tensors)
        self.device, self.stream, self.copied = device, None, None
        if device.type == "cuda":
            self.stream = torch.cuda.current_stream(device)
            self.copied = self.stream.record_event()

    def on_current_stream(self):
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            if current != self.stream:
                # The capture of a graph may wait for nothing outside it. It begins with a
                # synchronisation, after which what was copied before is there.
                if not torch.cuda.is_current_stream_capturing():
                    current.wait_event(self.copied)
                for tensor in self.tensors:
                    tensor.record_stream(current)
        return self.tensors


def calls(placement_q, rank_q, placement_k, rank_k, window, dense):
    """All that the rows of rank_q have to do with the keys of rank_k."""
    blocks = []
    queries = _by_sequence(placement_q, rank_q)
    keys = _by_sequence(placement_k, rank_k)
    for sequence in queries.keys() & keys.keys():
        shift = placement_k.lengths[sequence] - placement_q.lengths[sequence]
        blocks += _blocks(queries[sequence], keys[sequence], shift, *window)
    if dense:
        return tuple(Call(*block, None) for block in blocks)
    return tuple(_call(batch) for batch in _batches(sorted(blocks)))


def _by_sequence(placement, rank):
    groups = itertools.groupby(placement.segments(rank), lambda segment: segment.sequence)
    return {sequence: list(segments) for sequence, segments in groups}


def _blocks(q_segments, k_segments, shift, left, right):
    """The blocks of one sequence, as few as possible."""
    by_rows = []
    for q in q_segments:
        blocks = []
        for k in k_segments:
            block = _block(q, k, shift, left, right)
            if block is not None:
                _append_or_join(blocks, block, _join_keys)
        by_rows.append(blocks)
    joined = []
    for blocks in by_rows:
        if len(blocks) == 1:
            _append_or_join(joined, blocks[0], _join_rows)
        else:
            joined += blocks
    return joined


def _block(q, k, shift, left, right):
    """Of one segment of each, None if no row sees a key."""
    shift += q.start - k.start
    rows, keys = q.length, k.length
    if right >= 0:
        keys = min(keys, rows + shift + right)
    if left >= 0:
        rows = min(rows, keys - shift + left)
    if rows <= 0 or keys <= 0:
        return None
    to_last = shift - (keys - rows)  # from the kernels' diagonal to ours
    return Block(
        q.offset,
        rows,
        k.offset,
        keys,
        left=left - to_last if left >= 0 and left - to_last < keys - 1 else -1,
        right=right + to_last if right >= 0 and right + to_last < rows - 1 else -1,
    )


def _append_or_join(blocks, block, join):
    joined = join(blocks[-1], block) if blocks else None
    if joined is None:
        blocks.append(block)
    else:
        blocks[-1] = joined


def _join_keys(a, b):
    """The same rows; all of them see all keys of a, and those of b from the first one on."""
    if (a.row, a.rows, a.end_key) != (b.row, b.rows, b.key) or not a.is_full or b.left >= 0:
        return None
    if b.right >= 0 and b.keys - b.rows + b.right < -1:  # the first row does not get as far as b
        return None
    return a._replace(keys=a.keys + b.keys, right=b.right)


def _join_rows(a, b):
    """The rows of b come next; all see the keys from the same first one on. Where their end is a
    diagonal, it goes on from row to row, and is not cut off by the last key of a."""
    if (a.end_row, a.key) != (b.row, b.key) or a.left >= 0 or b.left >= 0:
        return None
    more = b.keys - a.keys
    full = a.is_full and b.is_full and more == 0
    diagonal = a.right == 0 <= b.right and more == b.rows - b.right
    return b._replace(row=a.row, rows=a.rows + b.rows) if full or diagonal else None


def _batches(blocks):
    """Blocks with one window whose rows and keys each come in order: they fit into one call."""
    batches = []
    for block in blocks:
        for batch in batches:
            last = batch[-1]
            in_order = last.end_row <= block.row and last.end_key <= block.key
            if last.window == block.window and in_order:
                batch.append(block)
                break
        else:
            batches.append([block])
    return batches


def _call(batch):
    first, last = batch[0], batch[-1]
    return Call(
        first.row,
        last.end_row - first.row,
        first.key,
        last.end_key - first.key,
        *first.window,
        tuple(batch),
    )
