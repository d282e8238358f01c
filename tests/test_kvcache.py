"""flash_attn_with_kvcache: reading a cache."""

import pytest
import torch
from hypothesis import given

import judge
import neginf
from kvcache_problems import CacheInputs, CacheProblem, cache_problems
from problems import int32
from targets import HALF, runs_on

ALL = ("float64", "float32", "bfloat16", "float16")

PROBLEMS = {
    "one_token": CacheProblem(lengths=(300, 5, 129), lengths_q=(1,) * 3),
    "no_length": CacheProblem(lengths=(0, 40), lengths_q=(1,) * 2),
    "pages_16": CacheProblem(lengths=(300, 5, 129), lengths_q=(1,) * 3, page_size=16),
    "pages_64": CacheProblem(lengths=(300, 64, 0), lengths_q=(2,) * 3, page_size=64, causal=True),
    "pages_1": CacheProblem(lengths=(33, 7), lengths_q=(1,) * 2, page_size=1),
    "pages_7_leftpad": CacheProblem(
        lengths=(100, 20), lengths_q=(3,) * 2, page_size=7, leftpad=(9, 20), causal=True
    ),
    "missing_pages": CacheProblem(
        lengths=(200, 90), lengths_q=(2,) * 2, page_size=16, missing=((0, 3), (0, 12), (1, 0)),
        window_size=(150, 1),
    ),
    "all_pages_missing": CacheProblem(
        lengths=(30,), lengths_q=(2,), page_size=16, missing=((0, 0), (0, 1)), sink=(1.0,) * 4
    ),
    "more_queries_than_keys": CacheProblem(lengths=(3, 0), lengths_q=(9,) * 2, causal=True),
    "mixed": CacheProblem(
        lengths=(513, 70, 0, 40), lengths_q=(1, 70, 2, 0), varlen=True, extra_q=3, causal=True
    ),
    "group_of_20": CacheProblem(lengths=(257,), lengths_q=(4,), heads=40, heads_k=2, causal=True),
    "options": CacheProblem(
        lengths=(300, 100), lengths_q=(5,) * 2, softcap=3.0, alibi="bh", sink=(0.5, -1.0, 2.0, 0.0),
        window_size=(120, 0), leftpad=(50, 99), entries=(3, 1),
    ),
    "narrow_values": CacheProblem(lengths=(140,), head_dim=192, head_dim_v=128),
    "head_dim_256": CacheProblem(lengths=(140, 33), lengths_q=(3,) * 2, head_dim=256),
    "head_dim_59": CacheProblem(lengths=(70, 33), lengths_q=(2,) * 2, head_dim=59, head_dim_v=33),
}  # fmt: skip


@runs_on("decode", dtypes=ALL)
@pytest.mark.parametrize("name", PROBLEMS)
def test_written_out(target, name):
    CacheInputs(PROBLEMS[name], target.dtype, target.device).check()


@runs_on("decode", dtypes=("float32", *HALF))
@given(problem=cache_problems())
def test_any_problem(target, problem):
    CacheInputs(problem, target.dtype, target.device).check()


@runs_on("decode", dtypes=("bfloat16",))
@pytest.mark.parametrize("name", PROBLEMS)
def test_splits_change_nothing_but_rounding(target, name):
    for splits in (1, 2, 5, 256):
        CacheInputs(PROBLEMS[name].with_(num_splits=splits), target.dtype, target.device).check()
    for keys in (1, 100, 10**6):
        problem = PROBLEMS[name].with_(seqlen_k_per_split=keys)
        CacheInputs(problem, target.dtype, target.device).check()


@runs_on("decode", dtypes=("bfloat16",))
@pytest.mark.parametrize("batch", [1, 40, 300])
def test_many_sequences_of_any_length(target, batch):
    """More sequences than a warp has lanes, and more tiles than a GPU has multiprocessors."""
    lengths = tuple((37 * b * b) % 700 for b in range(batch))
    problem = CacheProblem(lengths=lengths, lengths_q=(1,) * batch, page_size=16, room=1)
    CacheInputs(problem, target.dtype, target.device).check()


@runs_on("decode", dtypes=("float32", "bfloat16"))
def test_bits_of_a_sequence_do_not_depend_on_the_batch(target):
    lengths = (700, 5, 0, 64, 1300, 129)
    problem = CacheProblem(
        lengths=lengths, lengths_q=(1, 2, 1, 9, 3, 1), varlen=True, causal=True, page_size=16,
        seqlen_k_per_split=256, sink=(0.5,) * 4,
    )  # fmt: skip
    inputs = CacheInputs(problem, target.dtype, target.device)
    out, lse = inputs.check()
    for b, (rows,) in enumerate(inputs.rows_of_q()):
        alone = neginf.flash_attn_with_kvcache(
            inputs.tensor("q")[rows][None], inputs.tensor("k_cache"), inputs.tensor("v_cache"),
            cache_seqlens=inputs.options["cache_seqlens"][b : b + 1],
            page_table=inputs.options["page_table"][b : b + 1],
            causal=True, sink=inputs.options["sink"], seqlen_k_per_split=256, return_lse=True,
        )  # fmt: skip
        judge.assert_bits_equal(alone[0][0], out[rows], f"out of sequence {b}")
        judge.assert_bits_equal(alone[1][0], lse[:, rows], f"lse of sequence {b}")


@runs_on("decode", dtypes=("bfloat16",))
def test_the_same_bits_every_time(target):
    problem = CacheProblem(
        lengths=tuple(range(0, 1500, 50)), lengths_q=(2,) * 30, page_size=16, causal=True
    )
    inputs = CacheInputs(problem, target.dtype, target.device)
    first = inputs.check()
    for _ in range(20):
        for one, other in zip(first, inputs.call(), strict=True):
            judge.assert_bits_equal(one, other, "a repeated call")


@runs_on("decode", dtypes=("bfloat16",))
def test_nan_in_a_visible_key_is_nan_however_it_is_split(target):
    inputs = CacheInputs(PROBLEMS["one_token"], target.dtype, target.device)
    inputs.tensor("k_cache")[0, 200] = float("nan")
    for options in ({"num_splits": 1}, {"num_splits": 3}, {}, {"seqlen_k_per_split": 64}):
        out, lse = inputs.call(**{"num_splits": 0, **options})
        assert out[0].isnan().all()
        assert lse[0].isnan().all()
        assert out[1:].isfinite().all()
        assert lse[1:].isfinite().all()


@runs_on("decode", dtypes=("bfloat16",))
@pytest.mark.parametrize("page_size", [None, 16, 5])
def test_garbage_lengths_are_clamped(target, page_size):
    problem = CacheProblem(
        lengths=(60, 60, 0), lengths_q=(1,) * 3, page_size=page_size, room=0, leftpad=(0, 60, 0)
    )
    inputs = CacheInputs(problem, target.dtype, target.device)
    expected = inputs.check()
    got = inputs.call(
        cache_seqlens=int32((2**31 - 1, 2**31 - 1, -5), target.device),
        cache_leftpad=int32((-7, 2**31 - 1, 3), target.device),
    )
    if inputs.capacity == 60:
        judge.assert_state(got, *(t.cpu() for t in expected))
    else:  # slots behind the 60th hold NaN
        assert got[0][1:].eq(0).all()
        assert got[1][1:].isneginf().all()


@runs_on("decode", dtypes=("bfloat16",))
def test_entries_that_do_not_exist_have_no_keys(target):
    problem = CacheProblem(lengths=(60,) * 4, lengths_q=(1,) * 4, entries=(0, 3, 1, 2))
    inputs = CacheInputs(problem, target.dtype, target.device)
    out, lse = inputs.check()
    got = inputs.call(cache_batch_idx=int32((0, -1, 10**9, 2), target.device))
    judge.assert_bits_equal(got[0][::3], out[::3], "out")
    judge.assert_bits_equal(got[1][::3], lse[::3], "lse")
    judge.assert_zero(got[0][1:3], "out of entries that do not exist")
    assert got[1][1:3].isneginf().all()


@runs_on("decode", dtypes=("bfloat16",))
def test_out_is_written_in_place(target):
    for name in ("one_token", "mixed", "head_dim_59"):
        inputs = CacheInputs(PROBLEMS[name], target.dtype, target.device)
        expected = inputs.check()
        # Rows of a wider tensor.
        wide = torch.full(
            (*expected[0].shape[:-1], 2 * expected[0].shape[-1]), float("nan"),
            dtype=target.dtype, device=target.device,
        )  # fmt: skip
        out = wide[..., : expected[0].shape[-1]]
        got = inputs.call(out=out)
        assert got[0] is out
        judge.assert_bits_equal(out, expected[0], "out")
        judge.assert_bits_equal(got[1], expected[1], "lse")
        assert wide[..., expected[0].shape[-1] :].isnan().all()


@runs_on("decode", dtypes=("bfloat16",))
def test_names_of_other_libraries(target):
    inputs = CacheInputs(PROBLEMS["pages_16"], target.dtype, target.device)
    expected = inputs.check()
    table = inputs.options.pop("page_table")
    got = inputs.call(block_table=table, return_softmax_lse=True)
    judge.assert_bits_equal(got[0], expected[0], "block_table")
    with pytest.raises(ValueError, match="block_table: got a tensor together with page_table"):
        inputs.call(block_table=table, page_table=table)
    inputs = CacheInputs(
        CacheProblem(lengths=(50, 50), lengths_q=(1,) * 2), target.dtype, target.device
    )
    expected = inputs.check()
    got = inputs.call(cache_seqlens=50)
    judge.assert_bits_equal(got[0], expected[0], "one length for all")


@runs_on("decode", dtypes=("bfloat16",), gpu_only=True)
@pytest.mark.parametrize("page_size", [None, 16])
def test_a_graph_is_replayed_with_other_lengths(target, page_size):
    """A batch padded to the captured size: pad rows have length 0 and a page table of -1."""
    problem = CacheProblem(lengths=(40, 700, 9, 300), lengths_q=(1,) * 4, page_size=page_size)
    inputs = CacheInputs(problem, target.dtype, target.device)
    lengths = inputs.options["cache_seqlens"]
    inputs.call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = neginf.flash_attn_with_kvcache(
            *(inputs.tensor(n) for n in ("q", "k_cache", "v_cache")),
            return_lse=True,
            **inputs.options,
        )
    for used in ((40, 700, 9, 300), (40, 700, 0, 0), (1, 0, 9, 0), (0, 0, 0, 0)):
        now = CacheInputs(problem.with_(lengths=used, room=709 - max(used)), target.dtype)
        assert now.capacity == inputs.capacity
        lengths.copy_(int32(used, target.device))
        inputs.tensor("k_cache").copy_(now.tensor("k_cache"))
        inputs.tensor("v_cache").copy_(now.tensor("v_cache"))
        inputs.tensor("q").copy_(now.tensor("q"))
        if page_size is not None:
            table = now.options["page_table"].clone()
            table[torch.tensor(used) == 0] = -1
            inputs.options["page_table"].copy_(table)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        now.judge(out, lse)
