"""flash_attn_with_kvcache: bad arguments, torch's view of its operators, and public failures."""

import pytest
import torch
from torch.library import opcheck

import judge
import neginf
from kvcache_problems import CacheInputs, CacheProblem
from neginf import ops
from problems import int32
from targets import runs_on

# ---- bad arguments


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def arguments(**changes):
    """Good ones: two sequences, slots for 8 keys, one new."""
    good = {
        "q": zeros(2, 1, 4, 8),
        "k_cache": zeros(2, 8, 2, 8),
        "v_cache": zeros(2, 8, 2, 8),
        "cache_seqlens": int32([3, 7], "cpu"),
    }
    return {**good, **changes}


def names_of(changes):
    """For the names of tests: what is changed, not the tensors."""
    return ",".join(changes) or "nothing" if isinstance(changes, dict) else None


PAGED = {
    "k_cache": zeros(5, 4, 2, 8),
    "v_cache": zeros(5, 4, 2, 8),
    "page_table": int32([[0, 1], [4, 2]], "cpu"),
}
NEW = {"k": zeros(2, 1, 2, 8), "v": zeros(2, 1, 2, 8)}
ROTARY = {"rotary_cos": zeros(9, 4), "rotary_sin": zeros(9, 4)}
PACKED = {"q": zeros(5, 4, 8), "cu_seqlens_q": int32([0, 2, 5], "cpu"), "max_seqlen_q": 3}


@pytest.mark.parametrize(
    "changes",
    [{}, PAGED, NEW, {**NEW, **ROTARY}, {**PAGED, **NEW, **ROTARY}, PACKED, {**PACKED, **PAGED}],
    ids=names_of,
)
def test_the_arguments_are_good(changes):
    neginf.flash_attn_with_kvcache(**arguments(**changes), check_inputs=True)


BAD = [
    # what is changed, the exception, the argument its message begins with
    ({"q": zeros(2, 4, 8)}, ValueError, "q"),
    ({"q": zeros(3, 1, 4, 8)}, ValueError, "k_cache"),
    ({"q": zeros(2, 1, 3, 8)}, ValueError, "q"),
    ({"q": zeros(2, 1, 4, 16)}, ValueError, "k_cache"),
    ({"q": zeros(2, 1, 4, 8, dtype=torch.float64)}, TypeError, "k_cache"),
    ({"k_cache": zeros(2, 8, 2)}, ValueError, "k_cache"),
    ({"v_cache": zeros(2, 8, 2, 9)}, ValueError, "v_cache"),
    ({"v_cache": zeros(2, 9, 2, 8)}, ValueError, "v_cache"),
    ({"v_cache": zeros(2, 8, 2, 8, dtype=torch.float16)}, TypeError, "v_cache"),
    ({"cache_seqlens": torch.tensor([3, 7])}, TypeError, "cache_seqlens"),
    ({"cache_seqlens": int32([3], "cpu")}, ValueError, "cache_seqlens"),
    ({"cache_seqlens": 2**40}, ValueError, "cache_seqlens"),
    ({"cache_seqlens": -1}, ValueError, "cache_seqlens"),
    ({"cache_seqlens": [3, 7]}, TypeError, "cache_seqlens"),
    ({"q": [[0.0]]}, TypeError, "q"),
    ({**PAGED, "page_table": [[0, 1], [4, 2]]}, TypeError, "page_table"),
    ({"cache_batch_idx": int32([0], "cpu")}, ValueError, "cache_batch_idx"),
    ({"cache_batch_idx": torch.tensor([0, 1])}, TypeError, "cache_batch_idx"),
    ({"cache_leftpad": int32([0], "cpu")}, ValueError, "cache_leftpad"),
    ({**PAGED, "page_table": int32([[0, 1]], "cpu")}, ValueError, "page_table"),
    ({**PAGED, "page_table": int32([0, 1], "cpu")}, ValueError, "page_table"),
    ({**PAGED, "page_table": torch.tensor([[0, 1], [4, 2]])}, TypeError, "page_table"),
    ({**PAGED, "page_table": int32([[0, 1], [4, 2]], "cpu").t()}, ValueError, "page_table"),
    ({**PAGED, "cache_batch_idx": int32([0, 1], "cpu")}, ValueError, "cache_batch_idx"),
    ({**PAGED, "block_table": PAGED["page_table"]}, ValueError, "block_table"),
    ({"k": NEW["k"]}, ValueError, "k, v"),
    ({**NEW, "cache_seqlens": None}, ValueError, "cache_seqlens"),
    ({**NEW, "k": zeros(2, 1, 2, 9)}, ValueError, "k"),
    ({**NEW, "v": zeros(2, 2, 2, 8)}, ValueError, "v"),
    ({**NEW, "k": zeros(1, 1, 2, 8), "v": zeros(1, 1, 2, 8)}, ValueError, "k"),
    ({**NEW, "k": zeros(2, 1, 2, 8, dtype=torch.float16)}, TypeError, "k"),
    ({**NEW, "cu_seqlens_k_new": int32([0, 1, 2], "cpu")}, ValueError, "k"),
    (ROTARY, ValueError, "rotary_cos"),
    ({**NEW, "rotary_cos": zeros(9, 4)}, ValueError, "rotary_cos, rotary_sin"),
    ({**NEW, **ROTARY, "rotary_cos": zeros(9, 5)}, ValueError, "rotary_cos"),
    ({**NEW, **ROTARY, "rotary_cos": zeros(9, 0)}, ValueError, "rotary_cos"),
    ({**NEW, **ROTARY, "rotary_sin": zeros(9, 3)}, ValueError, "rotary_sin"),
    ({**NEW, **ROTARY, "rotary_seqlens": int32([0], "cpu")}, ValueError, "rotary_seqlens"),
    ({**NEW, "rotary_seqlens": int32([0, 1], "cpu")}, ValueError, "rotary_seqlens"),
    ({**NEW, "k_cache": zeros(2, 8, 8, 2).transpose(2, 3)}, ValueError, "k_cache"),
    ({**NEW, "k_cache": zeros(1, 8, 2, 8).expand(2, -1, -1, -1)}, ValueError, "k_cache"),
    ({**PACKED, "max_seqlen_q": -1}, ValueError, "max_seqlen_q"),
    ({**PACKED, "cu_seqlens_q": int32([0, 3, 2], "cpu")}, ValueError, "cu_seqlens_q"),
    ({"num_splits": -1}, ValueError, "num_splits"),
    ({"num_splits": 257}, ValueError, "num_splits"),
    ({"seqlen_k_per_split": 0}, ValueError, "seqlen_k_per_split"),
    ({"seqlen_k_per_split": 1.5}, TypeError, "seqlen_k_per_split"),
    ({"seqlen_k_per_split": 64, "num_splits": 2}, ValueError, "num_splits"),
    ({"softmax_scale": 0.0}, ValueError, "softmax_scale"),
    ({"window_size": (1,)}, ValueError, "window_size"),
    ({"sink": zeros(3)}, ValueError, "sink"),
    ({"alibi_slopes": zeros(2)}, ValueError, "alibi_slopes"),
    ({"out": zeros(2, 1, 4, 9)}, ValueError, "out"),
    ({"out": zeros(2, 1, 4, 8, dtype=torch.float16)}, TypeError, "out"),
    ({"out": zeros(2, 1, 1, 8).expand(2, 1, 4, 8)}, ValueError, "out"),
]


@pytest.mark.parametrize(("changes", "error", "name"), BAD, ids=names_of)
def test_bad_arguments(changes, error, name):
    with pytest.raises(error, match=f"^{name}"):
        neginf.flash_attn_with_kvcache(**arguments(**changes))
    with pytest.raises(error, match=f"^{name}"):
        neginf.flash_attn_with_kvcache(**arguments(**changes), check_inputs=True)


@pytest.mark.parametrize(("changes", "error", "name"), BAD, ids=names_of)
def test_bad_arguments_write_nothing(changes, error, name):
    """Whichever operator would refuse them: with rows for the cache, it is as it was."""
    if "k" in changes or "v" in changes or "rotary_cos" in changes:
        new = {}
    else:
        new = {name: tensor + 1 for name, tensor in NEW.items()}
    given = arguments(**{**new, **changes})
    before = {n: given[n].clone() for n in ("k_cache", "v_cache")}
    with pytest.raises(error):
        neginf.flash_attn_with_kvcache(**given)
    for cache, was in before.items():
        assert torch.equal(given[cache], was), cache


def test_out_of_the_memory_of_q():
    q = zeros(2, 1, 4, 8)
    with pytest.raises(ValueError, match=r"^out: got memory of q"):
        neginf.flash_attn_with_kvcache(**arguments(q=q, out=q))


VALUES = [
    (
        {"cache_seqlens": int32([3, 9], "cpu")},
        "cache_seqlens: got 9 at index 1; accepted are 0",
    ),
    ({"cache_seqlens": int32([-1, 3], "cpu")}, "cache_seqlens: got -1 at index 0"),
    ({**NEW, "cache_seqlens": int32([3, 8], "cpu")}, "cache_seqlens: got 8 at index 1"),
    ({"cache_leftpad": int32([0, 8], "cpu")}, "cache_leftpad: got 8 at index 1"),
    ({"cache_batch_idx": int32([2, 0], "cpu")}, "cache_batch_idx: got 2 at index 0"),
    (
        {**PAGED, "page_table": int32([[0, -1], [4, 5]], "cpu")},
        r"page_table: got 5 at index \(1, 1\)",
    ),
    ({**NEW, **ROTARY, "rotary_seqlens": int32([0, 9], "cpu")}, "rotary_seqlens: got 9 at index 1"),
    ({**NEW, "rotary_cos": zeros(7, 4), "rotary_sin": zeros(7, 4)}, "cache_seqlens: got 7"),
]


@pytest.mark.parametrize(("changes", "message"), VALUES, ids=names_of)
def test_values_are_looked_at_when_asked(changes, message):
    neginf.flash_attn_with_kvcache(**arguments(**changes))
    with pytest.raises(ValueError, match=f"^{message}"):
        neginf.flash_attn_with_kvcache(**arguments(**changes), check_inputs=True)


def test_there_is_no_gradient():
    q = zeros(2, 1, 4, 8).requires_grad_()
    out = neginf.flash_attn_with_kvcache(**arguments(q=q))
    with pytest.raises(RuntimeError, match="derivative for neginf::decode is not implemented"):
        out.sum().backward()


# ---- as torch sees it

PROBLEMS = {
    "dense": CacheProblem(lengths=(30, 0), lengths_q=(1,) * 2),
    "paged": CacheProblem(
        lengths=(30, 5), lengths_q=(2,) * 2, page_size=16, causal=True, sink=(0.5,) * 4
    ),
    "packed": CacheProblem(lengths=(30, 5), lengths_q=(2, 1), varlen=True, leftpad=(3, 0)),
}


def operator_arguments(inputs):
    p, get = inputs.problem, inputs.options.get
    names = ("q", "k_cache", "v_cache")
    return (
        *(inputs.tensor(n).clone(memory_format=torch.contiguous_format) for n in names),
        get("cache_seqlens"), get("page_table"), get("cache_batch_idx"), get("cache_leftpad"),
        get("cu_seqlens_q"), max(p.lengths_q) if p.varlen else None, p.softmax_scale, p.causal,
        *p.window_size, p.softcap, get("alibi_slopes"), get("sink"), p.num_splits, 0,
    )  # fmt: skip


@runs_on("decode", dtypes=("float32", "bfloat16"))
@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck(target, name):
    inputs = CacheInputs(PROBLEMS[name], target.dtype, target.device)
    args = [t.nan_to_num() if torch.is_tensor(t) and t.is_floating_point() else t
            for t in operator_arguments(inputs)]  # fmt: skip
    opcheck(ops.decode, tuple(args))
    opcheck(ops.decode_out, (*args, torch.empty_like(args[0])))


@runs_on("append", dtypes=("float32", "bfloat16"))
@pytest.mark.parametrize("rotates", [False, True])
def test_opcheck_append(target, rotates):
    inputs = CacheInputs(PROBLEMS["dense"], target.dtype, target.device)
    q, k_cache, v_cache, lengths = (
        t.nan_to_num() if t.is_floating_point() else t for t in operator_arguments(inputs)[:4]
    )
    k, v = (torch.randn_like(k_cache[:, :2]) for _ in range(2))
    cos = torch.randn(50, 8, dtype=target.dtype, device=target.device) if rotates else None
    sin = None if cos is None else cos.sin()
    opcheck(
        ops.append,
        (q, k, v, k_cache, v_cache, lengths, None, None, None, None, cos, sin, None, True, False),
    )


@runs_on("decode", "append", dtypes=("float32", "bfloat16"))
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(target, dynamic):
    """And the caches are written to, as in eager mode."""

    def step(q, k_cache, v_cache, k, v, lengths, table):
        return neginf.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, page_table=table, causal=True,
            return_lse=True,
        )  # fmt: skip

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for lengths in ((30, 5), (7, 0), (30, 21)):
        problem = CacheProblem(lengths=lengths, lengths_q=(2,) * 2, page_size=16)
        results = []
        for function in (step, compiled):
            inputs = CacheInputs(problem, target.dtype, target.device)
            q, k_cache, v_cache = (
                inputs.tensor(n).nan_to_num() for n in ("q", "k_cache", "v_cache")
            )
            k, v = (inputs.normal((2, 2, 2, 64)).to(target.device) for _ in range(2))
            table = inputs.pages.to(target.device)
            state = function(q, k_cache, v_cache, k, v, inputs.options["cache_seqlens"], table)
            results.append((*state, k_cache, v_cache))
        for eager, got in zip(*results, strict=True):
            assert got.stride() == eager.stride()
            judge.assert_bits_equal(got, eager, "compiled")


@runs_on("decode", "append", dtypes=("bfloat16",), gpu_only=True)
def test_nothing_waits_for_the_gpu(target):
    inputs = CacheInputs(PROBLEMS["paged"], target.dtype, target.device)
    k, v = (inputs.normal((2, 2, 2, 64)).to(target.device) for _ in range(2))
    cos = torch.randn(60, 8, dtype=target.dtype, device=target.device)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options in ({}, {"num_splits": 3}, {"seqlen_k_per_split": 64}):
            inputs.call(**options)
        inputs.call(k=k, v=v, rotary_cos=cos, rotary_sin=cos)
    finally:
        torch.cuda.set_sync_debug_mode(before)


# ---- public failures


@runs_on("decode", dtypes=("bfloat16",))
def test_flashinfer_pr_4975(target):
    """Case 3: a request without keys is written, too."""
    out, lse = CacheInputs(
        CacheProblem(lengths=(0, 5), lengths_q=(1,) * 2), target.dtype, target.device
    ).check()
    judge.assert_zero(out[0], "out")
    assert lse[0].isneginf().all()


@runs_on("decode", dtypes=("bfloat16",))
@pytest.mark.parametrize("splits", [1, 2, 0])
def test_torchtitan_3235_pytorch_194167(target, splits):
    """Case 14: pages of 256, every row written, whatever the splits."""
    problem = CacheProblem(
        lengths=(512, 300), lengths_q=(1,) * 2, heads=4, heads_k=4, page_size=256, room=0,
        num_splits=splits,
    )  # fmt: skip
    CacheInputs(problem, target.dtype, target.device).check()


@runs_on("decode", dtypes=("bfloat16",))
def test_flashinfer_pr_4401(target):
    """Case 17: more splits than keys."""
    problem = CacheProblem(lengths=(1,), num_splits=4)
    inputs = CacheInputs(problem, target.dtype, target.device)
    out, lse = inputs.check()
    one_out, one_lse = inputs.call(num_splits=1)
    judge.assert_state((out, lse), one_out.cpu(), one_lse.cpu())


@runs_on("decode", dtypes=("bfloat16",))
def test_flash_attention_1745_2374(target):
    """Case 21: the slot behind the last key holds NaN; and no key at all."""
    inputs = CacheInputs(CacheProblem(lengths=(1,), room=1), target.dtype, target.device)
    assert inputs.tensor("k_cache")[0, 1].isnan().all()
    inputs.check()
    out, lse = CacheInputs(CacheProblem(lengths=(0,), room=2), target.dtype, target.device).check()
    judge.assert_state((out, lse), 0, float("-inf"))


@runs_on("decode", dtypes=("bfloat16",))
def test_vllm_pr_57094_flashinfer_2883(target):
    """Case 22: a batch of 3 padded to 4, page table row of -1. In a captured graph:
    test_kvcache.test_a_graph_is_replayed_with_other_lengths."""
    problem = CacheProblem(lengths=(9, 9, 9, 0), lengths_q=(1,) * 4, page_size=16)
    inputs = CacheInputs(problem, target.dtype, target.device)
    inputs.options["page_table"][3] = -1
    out, lse = inputs.check()
    judge.assert_state((out[3], lse[3]), 0, float("-inf"))


@runs_on("decode", dtypes=("bfloat16",))
def test_flash_attention_pr_2711_vllm_42494(target):
    """Case 23: one column of 16 slots, a length of 17; and pages that do not exist."""
    problem = CacheProblem(lengths=(16,), page_size=16, room=0)
    inputs = CacheInputs(problem, target.dtype, target.device)
    expected = inputs.check()
    longer = int32([17], target.device)
    got = inputs.call(cache_seqlens=longer)
    judge.assert_state(got, *(t.cpu() for t in expected))
    with pytest.raises(ValueError, match="cache_seqlens: got 17 at index 0"):
        inputs.call(cache_seqlens=longer, check_inputs=True)
    table = torch.full_like(inputs.options["page_table"], 99)
    judge.assert_state(inputs.call(page_table=table), 0, float("-inf"))
    with pytest.raises(ValueError, match=r"page_table: got 99 at index \(0, 0\)"):
        inputs.call(page_table=table, check_inputs=True)


@runs_on("decode", dtypes=("bfloat16",))
@pytest.mark.parametrize("varlen", [False, True])
def test_flash_attention_907(target, varlen):
    """Case 25: ALiBi on the cache path is aligned to the last key."""
    problem = CacheProblem(
        lengths=(40, 7), lengths_q=(3,) * 2, alibi="bh", varlen=varlen, causal=True, page_size=16
    )
    CacheInputs(problem, target.dtype, target.device).check()


@runs_on("decode", dtypes=("bfloat16",), gpu_only=True)
def test_flash_attention_2611(target):
    """Case 32: entries and rows whose offset passes 2^31."""
    rows = 3 << 20
    cache = torch.empty(2, rows, 6, 128, dtype=target.dtype, device=target.device)
    k_cache, v_cache = cache[..., :3, :], cache[..., 3:, :]
    assert (rows - 1) * k_cache.stride(1) > 2**31
    inputs = CacheInputs(
        CacheProblem(lengths=(50,), heads=6, heads_k=3, head_dim=128, room=0), target.dtype
    )
    small_k, small_v = (inputs.tensor(n).to(target.device) for n in ("k_cache", "v_cache"))
    k_cache[1, rows - 50 :], v_cache[1, rows - 50 :] = small_k[0], small_v[0]
    got = neginf.flash_attn_with_kvcache(
        inputs.tensor("q").to(target.device), k_cache, v_cache,
        cache_seqlens=int32([rows], target.device), cache_leftpad=int32([rows - 50], target.device),
        cache_batch_idx=int32([1], target.device), return_lse=True,
    )  # fmt: skip
    inputs.judge(*got)
