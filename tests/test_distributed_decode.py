"""Decode over a cache that is spread over ranks, and the merge of the states of ranks."""

import pytest
import torch
import torch.distributed as dist

import judge
import oracle
from neginf.distributed import decode_attention, merge_over_ranks
from problems import int32
from ranks import dtype_here, here, lse_dtype_here

NEG_INF = float("-inf")


def in_decode(lengths, sink, method, dtype, varlen=False):
    """lengths: for each rank, the tokens that it has of each sequence."""
    rank, batch = dist.get_rank(), len(lengths[0])
    q, k, v, sink = decode_inputs(lengths, sink, dtype)
    capacity = max(lengths[rank])
    cache = [torch.full((batch, capacity, 2, n), torch.nan, dtype=dtype) for n in (16, 8)]
    for b in range(batch):
        begin = sum(one[b] for one in lengths[:rank])
        for here_, whole in zip(cache, (k, v), strict=True):
            here_[b, : lengths[rank][b]] = whole[b, begin : begin + lengths[rank][b]]
    used = int32(lengths[rank], here())
    state = decode_attention(
        q.to(here()), *(t.to(here()) for t in cache), seqused_k=used, method=method,
        sink=None if sink is None else sink.to(here()), return_lse=True,
    )  # fmt: skip
    return [t.cpu() for t in state]


def decode_inputs(lengths, sink, dtype):
    generator = torch.Generator().manual_seed(0)
    batch, longest = len(lengths[0]), sum(map(max, lengths))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    softmax_dtype = torch.promote_types(dtype, torch.float32)
    sink = torch.tensor([0.5, NEG_INF] * 6, dtype=softmax_dtype) if sink else None
    q, k, v = normal(batch, 2, 12, 16), normal(batch, longest, 2, 16), normal(batch, longest, 2, 8)
    return q, k, v, sink


CACHES = {
    "all ranks": [(5, 2, 9), (3, 3, 0), (4, 1, 1)],
    "ranks without keys": [(0, 0, 0), (5, 0, 2), (0, 0, 0)],
    "all empty": [(0, 0, 0)] * 3,
    "one has less room": [(7, 8, 9), (0, 0, 0), (2, 1, 0)],
}


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("method", ["reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("name", CACHES)
def test_decode(ranks, name, method, sink):
    lengths = CACHES[name][: ranks.size]
    dtypes = [torch.bfloat16] if ranks.device == "cuda" else [torch.float64, torch.bfloat16]
    for dtype in dtypes:
        parts = ranks.run(in_decode, lengths, sink, method, dtype)
        out = torch.cat([part[0] for part in parts], 2)
        lse = torch.cat([part[1] for part in parts], 1)
        q, k, v, sinks = decode_inputs(lengths, sink, dtype)
        used = torch.tensor(lengths).sum(0)
        exact, low = (
            oracle.attention(q, k, v, compute=c, sink=sinks, seqused_k=used)
            for c in (torch.float64, dtype)
        )
        _, low_lse = oracle.attention(
            q, k, v, sink=sinks, seqused_k=used, compute=torch.promote_types(dtype, torch.float32)
        )
        judge.assert_close(out, exact[0], low[0], "out", size=3.0, sum_size=8.0)
        judge.assert_close(lse, exact[1], low_lse, "lse", sum_size=8.0)
        if sink is False:
            judge.assert_zero(out[used == 0], "out of sequences without keys")


def in_merge(outs, lses, method):
    rank = dist.get_rank()
    merged = merge_over_ranks(outs[rank].to(here()), lses[rank].to(here()), method=method)
    return [t.cpu() for t in merged]


@pytest.mark.parametrize("method", ["reduce_scatter", "all_to_all"])
def test_what_an_empty_state_holds_does_not_matter(ranks, method):
    """Rows: ordinary, empty on the last rank beside NaN, empty everywhere, NaN on the first."""
    torch.manual_seed(0)
    outs, lses = torch.randn(ranks.size, 4, 6, 8), torch.randn(ranks.size, 6, 4)
    lses[-1, :, 1] = lses[:, :, 2] = NEG_INF
    outs[-1, 1] = outs[:, 2] = torch.nan
    lses[0, :, 3] = torch.nan
    parts = ranks.run(in_merge, outs, lses, method)
    got = torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 0)
    expected = oracle.merge(outs, lses)
    low = oracle.merge(outs, lses, torch.float32)
    judge.assert_close(got[0], expected[0], low[0], "out")
    judge.assert_close(got[1], expected[1], low[1], "lse")
    judge.assert_state((got[0][2], got[1][:, 2]), 0, NEG_INF)


def decoded_with_a_sink_of_inf(method):
    size = dist.get_world_size()
    q = torch.randn(1, 1, 2 * size, 8).to(here(), dtype_here())
    sink = torch.tensor([torch.inf, 0.5] * size, device=here(), dtype=lse_dtype_here())
    out, lse = decode_attention(q, q, q, sink=sink, method=method, return_lse=True)
    assert out.isnan().all(-1).flatten().tolist() == [True, False]
    assert lse.isnan().flatten().tolist() == [True, False]


@pytest.mark.parametrize("method", ["reduce_scatter", "all_to_all"])
def test_decode_with_a_sink_of_inf(ranks, method):
    ranks.run(decoded_with_a_sink_of_inf, method)
