"""Sequences cut up for ranks: each pair of a row and a key that it sees is in exactly one call."""

import itertools
import random

import pytest
import torch

import oracle
from neginf.distributed.calls import Kept, calls
from neginf.distributed.placement import Placement

WINDOWS = [(-1, -1), (-1, 0), (3, 0), (0, 0), (2, 1), (-1, 2), (4, -1), (0, 9), (30, 30)]


class Stream:
    """A stand-in for one of CUDA's, that writes down what is done to it."""

    def __init__(self):
        self.waited, self.tensors = [], []

    def record_event(self):
        return "event", self

    def wait_event(self, event):
        self.waited.append(event)


class OnStreams:
    """A stand-in for a tensor on a GPU."""

    def record_stream(self, stream):
        stream.tensors.append(self)


@pytest.mark.parametrize("capturing", [False, True])
def test_other_streams_wait_for_what_is_kept(monkeypatch, capturing):
    first, other = Stream(), Stream()
    current = [first]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr("neginf.distributed.calls.to_device", lambda tensor, device: tensor)
    tensors = OnStreams(), OnStreams()
    kept = Kept(tensors, torch.device("cuda", 0))
    assert kept.on_current_stream() == tensors
    assert (first.waited, first.tensors) == ([], [])
    current[0] = other
    assert kept.on_current_stream() == tensors
    assert other.waited == ([] if capturing else [("event", first)])
    assert other.tensors == [*tensors]
    assert first.waited == []


def tokens_of(placement, rank):
    ranges = [placement.tokens(segment) for segment in placement.segments(rank)]
    return list(itertools.chain(*ranges))


def pairs_of_call(call):
    """(row, key) of the ranks' tensors, by the rule of the attention functions."""
    blocks = [call] if call.blocks is None else call.blocks
    for block in blocks:
        mask = oracle.visible(block.rows, block.keys, window_size=(call.left, call.right))
        assert mask[:, -1].any(), "a key that no row sees"
        assert mask[-1].any(), "a row that sees no key"
        for row, key in mask.nonzero().tolist():
            yield block.row + row, block.key + key


def seen(placement_q, placement_k, window, dense, gathered):
    """(row, key) of whole sequences that are in the calls of all ranks, with repetitions."""
    pairs = []
    for rank_q in range(placement_q.size):
        rows = tokens_of(placement_q, rank_q)
        placement = placement_k.gathered if gathered else placement_k
        for rank_k in range(placement.size):
            keys = tokens_of(placement, rank_k)
            for call in calls(placement_q, rank_q, placement, rank_k, window, dense):
                pairs += [(rows[row], keys[key]) for row, key in pairs_of_call(call)]
    return pairs


def expected(lengths_q, lengths_k, window):
    row, key = 0, 0
    for rows, keys in zip(lengths_q, lengths_k, strict=True):
        mask = oracle.visible(rows, keys, window_size=window)
        yield from ((row + i, key + j) for i, j in mask.nonzero().tolist())
        row, key = row + rows, key + keys


def check(lengths_q, lengths_k, size, kind, window, dense):
    placements = (Placement(tuple(n), size, kind) for n in (lengths_q, lengths_k))
    placement_q, placement_k = placements
    for gathered in (False, True):
        pairs = seen(placement_q, placement_k, window, dense, gathered)
        assert sorted(pairs) == sorted(expected(lengths_q, lengths_k, window))


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("window", WINDOWS)
def test_dense(kind, window):
    for size, rows, keys in itertools.product((1, 2, 3), (0, 1, 4, 13), (0, 1, 5, 13, 24)):
        check([rows], [keys], size, kind, window, dense=True)


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("window", WINDOWS)
def test_packed(kind, window):
    draw = random.Random(0)
    for size in (1, 2, 3, 4):
        for _ in range(4):
            sequences = draw.randint(0, 5)
            lengths_q = [draw.choice([0, 1, 2, 7, 16]) for _ in range(sequences)]
            lengths_k = [draw.choice([n, n, 0, 3, 20]) for n in lengths_q]
            check(lengths_q, lengths_k, size, kind, window, dense=False)


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_every_token_has_one_place(kind):
    placement = Placement((5, 0, 12, 1), 3, kind)
    tokens = [tokens_of(placement, rank) for rank in range(3)]
    assert sorted(itertools.chain(*tokens)) == list(range(18))
    for rank in range(3):
        ends = itertools.accumulate(s.length for s in placement.segments(rank))
        assert [s.offset + s.length for s in placement.segments(rank)] == list(ends)


@pytest.mark.parametrize("lengths", [(64,), (64, 16, 128)])
def test_causal_zigzag_is_one_even_call_for_each_step(lengths):
    placement = Placement(lengths, 4, "zigzag")
    work = [0] * 4
    for rank, source in itertools.product(range(4), repeat=2):
        (call,) = calls(placement, rank, placement, source, (-1, 0), len(lengths) == 1)
        work[rank] += len(list(pairs_of_call(call)))
    assert len(set(work)) == 1


def test_a_window_leaves_ranks_out():
    placement = Placement((64,), 8, "contiguous")
    met = [
        (rank, source)
        for rank, source in itertools.product(range(8), repeat=2)
        if calls(placement, rank, placement, source, (8, 0), True)
    ]
    assert met == [(0, 0)] + [(rank, rank - i) for rank in range(1, 8) for i in (1, 0)]


def test_arguments_of_a_packed_call():
    """Rank 1 of 2 has the tokens 1 to 5 of each sequence of 6 but for those in the middle."""
    placement = Placement((8, 8), 2, "zigzag")
    (call,) = calls(placement, 0, placement, 1, (-1, 0), False)
    cu_q, cu_k, used_q, used_k, max_q, max_k = call.varlen_arguments(torch.device("cpu"))
    assert (call.row, call.rows, call.key, call.keys) == (2, 6, 0, 8)
    assert (cu_q.tolist(), used_q.tolist(), max_q) == ([0, 4, 6], [2, 2], 4)
    assert (cu_k.tolist(), used_k.tolist(), max_k) == ([0, 4, 8], [4, 4], 4)
