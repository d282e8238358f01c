"""Converters: states of other libraries, told apart by what each writes, and their gradients."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

import judge
import neginf
import oracle
from neginf import convert
from problems import cumulative, int32
from targets import runs_on

NEG_INF = float("-inf")
NAN = float("nan")
INF = float("inf")


def accumulate(dtype):
    return torch.promote_types(dtype, torch.float32)


def state(lead, heads=3, head_dim=8, dtype=torch.float64, seed=0, kinds=(0.3, 0.2)):
    """A state as the contract has it; `kinds` are the shares of empty rows and of NaN rows."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(*lead, heads, head_dim, generator=generator, dtype=torch.float64).to(dtype)
    lse = 5 * torch.randn(*lead[:-1], heads, lead[-1], generator=generator, dtype=torch.float64)
    kind = torch.rand(lse.shape, generator=generator)
    empty, nan = kind < kinds[0], kind > 1 - kinds[1]
    lse[empty], lse[nan] = NEG_INF, NAN
    out[empty.transpose(-1, -2)] = 0
    out[nan.transpose(-1, -2)] = NAN
    return out, lse.to(accumulate(dtype))


LEADS = [(2, 5), (7,), (1, 1), (2, 0), (0,)]
PACKED = [(7,), (1,), (0,)]
ROUND_TRIPS = {
    "fa2": (convert.to_fa2, convert.from_fa2, LEADS),
    "fa3": (convert.to_fa3, convert.from_fa3, LEADS),
    "flashmla": (convert.to_flashmla, convert.from_flashmla, LEADS),
    "flashinfer": (convert.to_flashinfer, convert.from_flashinfer, PACKED),
    **{
        f"sentinel-{base2}-{heads_last}": (
            lambda o, s, b=base2, h=heads_last: convert.to_sentinel(
                o, s, -1e30, base2=b, heads_last=h
            ),
            lambda o, s, b=base2, h=heads_last: convert.from_sentinel(
                o, s, -1e30, base2=b, heads_last=h
            ),
            LEADS,
        )
        for base2, heads_last in itertools.product([False, True], repeat=2)
    },
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@given(seed=st.integers(0, 1000), data=st.data())
def test_there_and_back(name, dtype, seed, data):
    to, back, leads = ROUND_TRIPS[name]
    out, lse = state(data.draw(st.sampled_from(leads)), dtype=dtype, seed=seed)
    got_out, got_lse = back(*to(out, lse))
    judge.assert_bits_equal(got_out, out, "out")
    judge.assert_special_positions_equal(got_lse, lse, "lse")
    tolerance = 4 * torch.finfo(lse.dtype).eps
    torch.testing.assert_close(got_lse, lse, rtol=tolerance, atol=0, equal_nan=True)
    assert got_lse.is_contiguous()
    assert got_lse.dtype == lse.dtype


@pytest.mark.parametrize("name", ROUND_TRIPS)
@pytest.mark.parametrize("payload", [NAN, 5.0])
def test_an_empty_row_stays_empty_whatever_its_payload(name, payload):
    """+inf beside a stale payload would come back as NaN."""
    to, back, _ = ROUND_TRIPS[name]
    out, lse = state((7,), dtype=torch.float32)
    stale = torch.where((lse == NEG_INF).T[..., None], payload, out)
    judge.assert_special_positions_equal(back(*to(stale, lse))[1], lse, "lse")


def source_rows(head_dim=4):
    """One row each: ordinary, empty, NaN; out of 3 rows and 1 head."""
    out = torch.randn(3, 1, head_dim)
    out[1], out[2] = 0, NAN
    return out


@pytest.mark.parametrize(
    ("convert_from", "lse", "expected"),
    [
        (convert.from_fa2, [0.5, INF, INF], [0.5, NEG_INF, NAN]),
        (convert.from_fa3, [0.5, NEG_INF, NEG_INF], [0.5, NEG_INF, NAN]),
        (convert.from_fa3, [0.5, INF, INF], [0.5, NEG_INF, NAN]),
        (convert.from_fa3, [NAN, NEG_INF, NAN], [NAN, NEG_INF, NAN]),
    ],
)
def test_infinities_beside_zeros_and_nan(convert_from, lse, expected):
    out = source_rows()
    got_out, got_lse = convert_from(out, torch.tensor([lse]))
    judge.assert_state((got_out, got_lse), out, torch.tensor([expected]))


@pytest.mark.parametrize(("mark", "beside_nan"), [(INF, NAN), (NEG_INF, NEG_INF)])
def test_flashmla_layouts_and_marks(mark, beside_nan):
    out = source_rows()
    got = convert.from_flashmla(out, torch.tensor([[0.5], [mark], [mark]]))  # (total, heads)
    judge.assert_state(got, out, torch.tensor([[0.5, NEG_INF, beside_nan]]))
    got = convert.from_flashmla(out[None], torch.tensor([[[0.5, mark, mark]]]))  # (b, heads, rows)
    judge.assert_state(got, out[None], torch.tensor([[[0.5, NEG_INF, beside_nan]]]))


def test_an_infinity_beside_finite_values_is_not_empty():
    """No library writes this; so nothing is known of it."""
    out = torch.ones(1, 1, 4)
    assert convert.from_fa2(out, torch.tensor([[INF]]))[1].isnan().all()
    out[..., 1:] = 0  # one value is enough
    assert convert.from_fa2(out, torch.tensor([[INF]]))[1].isnan().all()


@pytest.mark.parametrize(
    ("convert_from", "payload"),
    [
        (convert.from_fa2, NAN),
        (convert.from_fa2, 5.0),
        (convert.from_fa3, 5.0),
        (convert.from_flashmla, NAN),
        (convert.from_flashmla, 5.0),
    ],
)
def test_a_negative_infinity_is_empty_whatever_out_holds(convert_from, payload):
    """And gets no gradient."""
    lse = torch.tensor([[NEG_INF]], requires_grad=True)
    _, got = convert_from(torch.full((1, 1, 4), payload), lse)
    assert got == NEG_INF
    (dlse,) = torch.autograd.grad(got, lse, torch.full_like(got, NAN))
    assert dlse == 0


@runs_on("combine")
def test_vllm_pr_15492_converted(target):
    """An empty partial (0, +inf) of FlashAttention-2 merged with (o, 0.5) is (o, 0.5)."""
    out = torch.randn(1, 1, 1, 64).to(target.device, target.dtype)
    lse = torch.full((1, 1, 1), 0.5, dtype=accumulate(target.dtype), device=target.device)
    empty = convert.from_fa2(torch.zeros_like(out), torch.full_like(lse, INF))
    merged = neginf.merge_states(*zip(empty, (out, lse), strict=True))
    judge.assert_bits_equal(merged[0], out, "out")
    judge.assert_bits_equal(merged[1], lse, "lse")
    nan = convert.from_fa2(torch.full_like(out, NAN), torch.full_like(lse, INF))
    judge.assert_state(neginf.merge_states(*zip(nan, (out, lse), strict=True)), NAN, NAN)


@runs_on("forward", "combine")
def test_sglang_40903_flashinfer_4485_in_base_2(target):
    """q = 0: 3072 keys and 64 keys, through base 2, weigh 3072 : 64."""
    q = torch.zeros(1, 1, 2, 64).to(target.device, target.dtype)
    k = torch.zeros(1, 3072, 2, 64).to(target.device, target.dtype)
    parts = []
    for keys, value in ((3072, 0.0), (64, 1.0)):
        out, lse = neginf.flash_attn_func(
            q, k[:, :keys], torch.full_like(k[:, :keys], value), return_lse=True
        )
        base2 = convert.to_flashinfer(out[0], lse[0])
        assert base2[1].flatten().tolist() == pytest.approx([math.log2(keys)] * 2, rel=1e-6)
        parts.append(convert.from_flashinfer(*base2))
    out, lse = neginf.merge_states(*zip(*parts, strict=True))
    assert lse.flatten().tolist() == pytest.approx([math.log(3136)] * 2, rel=1e-6)
    tolerance = {"rtol": torch.finfo(target.dtype).eps, "atol": 1e-6}
    expected = torch.full_like(out, 64 / 3136)
    torch.testing.assert_close(out, expected, **tolerance)


def test_the_default_dtype_changes_nothing():
    out, lse = source_rows(), torch.tensor([[0.5, INF, INF]])
    torch.set_default_dtype(torch.float64)
    try:
        results = [
            convert.from_fa2(out, lse),
            convert.from_flashmla(out, lse.T, attn_sink=torch.zeros(1, dtype=torch.float32)),
            convert.from_flashinfer(out, lse.T),
            convert.from_sentinel(out, lse, -1e30),
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {t.dtype for result in results for t in result} == {torch.float32}


def test_flashinfer_writes_no_positive_infinity():
    _, lse = convert.from_flashinfer(torch.ones(1, 1, 4), torch.tensor([[INF]]))
    assert lse.isnan().all()


@pytest.mark.parametrize(
    "convert_from",
    [convert.from_flashinfer, lambda o, s: convert.from_sentinel(o, s, -1e30, heads_last=True)],
)
def test_what_lies_in_out_of_an_empty_row_does_not_stay(convert_from):
    out, lse = convert_from(torch.full((1, 1, 4), NAN), torch.tensor([[NEG_INF]]))
    judge.assert_state((out, lse), 0, NEG_INF)


def test_a_low_score_is_not_a_sentinel():
    lse = torch.tensor([[-5e4, -46341.0, -60000.0, -5e4 - 0.01]])
    got = convert.from_sentinel(torch.ones(4, 1, 2), lse, -5e4)[1]
    assert got.tolist() == [[NEG_INF, -46341.0, -60000.0, lse[0, 3].item()]]


@pytest.mark.parametrize("sinks", [(0.5, -1.0), (NEG_INF, 2.0)])
def test_flashmla_sink_belongs_to_the_lse(sinks):
    """FlashMLA: out with the sink, lse without. Converted, both are with it."""
    q, k, v = (torch.randn(1, n, 2, 8, dtype=torch.float64) for n in (6, 4, 4))
    sink = torch.tensor(sinks, dtype=torch.float64)
    out, lse = neginf.flash_attn_func(q, k, v, causal=True, sink=sink, return_lse=True)
    _, without = neginf.flash_attn_func(q, k, v, causal=True, return_lse=True)
    as_flashmla = torch.where(without == NEG_INF, INF, without)
    got = convert.from_flashmla(out, as_flashmla, attn_sink=sink)
    judge.assert_bits_equal(got[0], out, "out")
    judge.assert_special_positions_equal(got[1], lse, "lse")
    torch.testing.assert_close(got[1], lse, rtol=1e-14, atol=1e-14)


def test_a_flashmla_sink_of_plus_infinity_is_nan():
    """+inf is never a public value."""
    lse = torch.tensor([[1.0, INF]])  # (total, heads)
    _, got = convert.from_flashmla(torch.zeros(1, 2, 4), lse, attn_sink=torch.full((2,), INF))
    assert got.isnan().all()


def test_gradient_of_the_flashmla_sink():
    lse = torch.tensor([[1.0, NEG_INF, -2.0], [0.3, NEG_INF, NEG_INF]], dtype=torch.float64)
    out = torch.zeros(3, 2, 4, dtype=torch.float64)
    sink = torch.tensor([0.7, NEG_INF], dtype=torch.float64, requires_grad=True)
    leaf = lse.T.contiguous().requires_grad_()
    _, got = convert.from_flashmla(out, leaf, attn_sink=sink)
    dlse = torch.ones_like(got)
    dlse[1, 1:] = NAN  # empty, with no sink either
    d_leaf, d_sink = torch.autograd.grad(got, (leaf, sink), dlse)
    weight = torch.sigmoid(sink.detach()[0] - lse[0])
    assert d_sink.tolist() == pytest.approx([weight.sum().item(), 0.0])
    assert d_leaf[:, 0].tolist() == pytest.approx((1 - weight).tolist())
    assert d_leaf[:, 1].tolist() == [1.0, 0.0, 0.0]


BASE_CHANGES = {
    "fa2": (convert.from_fa2, convert.to_fa2, False, False, INF),
    "fa3": (convert.from_fa3, convert.to_fa3, False, False, NEG_INF),
    "flashmla": (convert.from_flashmla, convert.to_flashmla, False, True, INF),
    "flashinfer": (convert.from_flashinfer, convert.to_flashinfer, True, True, NEG_INF),
    "sentinel": (
        lambda o, s: convert.from_sentinel(o, s, -1e30, base2=True),
        lambda o, s: convert.to_sentinel(o, s, -1e30, base2=True),
        True,
        False,
        -1e30,
    ),
}


@pytest.mark.parametrize("name", BASE_CHANGES)
def test_gradients(name):
    """The base scales the gradient; a row without keys gets 0, whatever comes in."""
    convert_from, to, base2, heads_last, mark = BASE_CHANGES[name]
    out, lse = state((6,), heads=2, kinds=(0.4, 0.0))
    empty = lse == NEG_INF
    assert empty.any()
    assert not empty.all()
    scale = math.log(2) if base2 else 1.0
    as_source = torch.where(empty, mark, lse / scale)
    as_source = as_source.T.contiguous() if heads_last else as_source
    dlse = torch.randn(lse.shape, dtype=torch.float64)
    dlse[empty] = NAN

    source = out.clone().requires_grad_(), as_source.requires_grad_()
    result = convert_from(*source)
    d_out, d_lse = torch.autograd.grad(result, source, (torch.ones_like(out), dlse))
    d_lse = d_lse.T if heads_last else d_lse
    judge.assert_zero(d_lse[empty], "dlse of empty rows")
    torch.testing.assert_close(d_lse[~empty], scale * dlse[~empty], rtol=1e-15, atol=0)
    assert (d_out[~empty.T] == 1).all()

    if name == "fa3":
        return  # to_fa3 returns its arguments
    own = out.clone().requires_grad_(), lse.clone().requires_grad_()
    dlse_source = dlse.T if heads_last else dlse
    _, d_lse = torch.autograd.grad(to(*own), own, (torch.ones_like(out), dlse_source))
    judge.assert_zero(d_lse[empty], "dlse of empty rows")
    torch.testing.assert_close(d_lse[~empty], dlse[~empty] / scale, rtol=1e-15, atol=0)


@pytest.mark.parametrize("change", [convert.lse_from_base2, convert.lse_to_base2])
def test_a_change_of_base_stops_the_gradient_of_empty_rows(change):
    lse = torch.tensor([1.0, NEG_INF, -2.0], requires_grad=True)
    (d_lse,) = torch.autograd.grad(change(lse), lse, torch.tensor([1.0, NAN, 1.0]))
    scale = math.log(2) if change is convert.lse_from_base2 else 1 / math.log(2)
    assert d_lse.tolist() == pytest.approx([scale, 0.0, scale])


def test_gradcheck_through_converters_and_merge():
    """Two results in the forms of two libraries, merged; the gradient reaches both."""
    mine = state((6,), heads=2, kinds=(0.5, 0.0), seed=1)
    theirs = convert.to_flashinfer(*state((6,), heads=2, kinds=(0.5, 0.0), seed=2))
    empty_mine, empty_theirs = mine[1] == NEG_INF, theirs[1] == NEG_INF
    leaves = [torch.where(t.isinf(), 0, t).requires_grad_() for t in (*mine, *theirs)]

    def function(out_a, lse_a, out_b, lse_b):
        a = convert.from_fa2(
            torch.where(empty_mine.T[..., None], 0, out_a), torch.where(empty_mine, INF, lse_a)
        )
        b = convert.from_flashinfer(out_b, torch.where(empty_theirs, NEG_INF, lse_b))
        out, lse = neginf.merge_states(*zip(a, b, strict=True))
        return out, torch.where(lse == NEG_INF, 0, lse)

    assert (empty_mine & empty_theirs.T).any()
    assert gradcheck(function, leaves)


LENGTHS = st.lists(st.integers(0, 5), min_size=0, max_size=4)


@given(lengths=LENGTHS, extra=st.integers(0, 3), slack=st.integers(0, 3))
def test_padded_layout(lengths, extra, slack):
    total, max_seqlen = sum(lengths) + extra, max(lengths, default=0) + slack
    cu_seqlens = int32(cumulative(lengths), "cpu")
    lse = torch.randn(2, total)
    padded = convert.lse_to_padded(lse, cu_seqlens, max_seqlen)
    expected = torch.full((len(lengths), 2, max_seqlen), NEG_INF)
    for b, length in enumerate(lengths):
        begin = cu_seqlens[b]
        expected[b, :, :length] = lse[:, begin : begin + length]
    judge.assert_bits_equal(padded, expected, "padded")
    padded[padded == NEG_INF] = NAN  # what old releases leave there
    packed = convert.lse_from_padded(padded, cu_seqlens, total)
    lse[:, sum(lengths) :] = NEG_INF
    judge.assert_bits_equal(packed, lse, "packed")


def test_padded_results_of_fa2():
    lengths = [3, 0, 2]
    cu_seqlens = int32(cumulative(lengths), "cpu")
    out, lse = state((5,), heads=2, dtype=torch.float32)
    theirs = convert.to_fa2(out, lse, cu_seqlens_q=cu_seqlens, max_seqlen_q=4)
    assert theirs[1].shape == (3, 2, 4)
    assert (theirs[1][1] == INF).all()
    got = convert.from_fa2(*theirs, cu_seqlens_q=cu_seqlens)
    judge.assert_state(got, out, lse)


@pytest.mark.parametrize("max_seqlen", [0, 2])
def test_a_sequence_longer_than_its_padding_is_nan(max_seqlen):
    got = convert.lse_from_padded(torch.zeros(1, 1, max_seqlen), int32([0, 3], "cpu"), 4)
    expected = torch.tensor([0, 0, NAN, NEG_INF])
    expected[max_seqlen:3] = NAN
    judge.assert_state((got, got), expected, expected)


def test_gradients_of_the_padded_layout():
    cu_seqlens = int32([0, 3, 3, 5], "cpu")
    lse = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)

    def function(lse):
        padded = convert.lse_to_padded(lse, cu_seqlens, 4)
        packed = convert.lse_from_padded(padded, cu_seqlens, 6)
        return torch.where(packed == NEG_INF, 0, packed)

    assert gradcheck(function, (lse,))


def test_compiles_without_a_graph_break():
    def function(out, lse):
        return convert.from_fa2(*convert.to_fa2(*convert.from_flashinfer(out, lse)))

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    out, lse = convert.to_flashinfer(*state((6,), dtype=torch.float32))
    for got, expected in zip(compiled(out, lse), function(out, lse), strict=True):
        judge.assert_bits_equal(got, expected, "compiled")


OUT, LSE = torch.zeros(2, 5, 3, 8), torch.zeros(2, 3, 5)
CU_SEQLENS = int32([0, 2, 5], "cpu")
BAD = [
    (lambda: convert.from_fa2(OUT, LSE.transpose(1, 2)), ValueError, "lse"),
    (lambda: convert.from_fa2(OUT, LSE[0]), ValueError, "lse"),
    (lambda: convert.from_fa2(OUT, LSE.double()), TypeError, "lse"),
    (lambda: convert.from_fa2(OUT, LSE.to("meta")), ValueError, "lse"),
    (lambda: convert.from_fa2(OUT.double(), LSE), TypeError, "lse"),
    (lambda: convert.from_fa2(OUT, None), TypeError, "lse"),
    (lambda: convert.from_fa2([], LSE), TypeError, "out"),
    (lambda: convert.from_fa2(OUT[0, 0], LSE), ValueError, "out"),
    (lambda: convert.from_fa2(OUT[0], LSE, cu_seqlens_q=CU_SEQLENS[:2]), ValueError, "cu_seqlens"),
    (lambda: convert.from_fa2(OUT[0], LSE[0], cu_seqlens_q=CU_SEQLENS), ValueError, "lse"),
    (lambda: convert.to_fa2(OUT[0], LSE[0], cu_seqlens_q=CU_SEQLENS), ValueError, "max_seqlen_q"),
    (lambda: convert.to_fa2(OUT[0], LSE[0], max_seqlen_q=3), ValueError, "cu_seqlens_q"),
    (lambda: convert.to_fa3(OUT, LSE[:1]), ValueError, "lse"),
    (lambda: convert.from_fa3(OUT, LSE.half()), TypeError, "lse"),
    (lambda: convert.from_flashmla(OUT[0], LSE[0]), ValueError, "lse"),
    (lambda: convert.from_flashmla(OUT, LSE, attn_sink=torch.zeros(2)), ValueError, "attn_sink"),
    (lambda: convert.from_flashmla(OUT, LSE, attn_sink=[0.0] * 3), TypeError, "attn_sink"),
    (
        lambda: convert.from_flashmla(OUT, LSE, attn_sink=torch.zeros(3, device="meta")),
        ValueError,
        "attn_sink",
    ),
    (lambda: convert.from_flashmla(None, LSE), TypeError, "out"),
    (lambda: convert.from_flashinfer(OUT, LSE.transpose(1, 2)), ValueError, "out"),
    (lambda: convert.from_flashinfer(OUT[0], LSE[0]), ValueError, "lse"),
    (lambda: convert.to_flashinfer(OUT, LSE), ValueError, "out"),
    (lambda: convert.from_sentinel(OUT, LSE, INF), ValueError, "value"),
    (lambda: convert.from_sentinel(OUT, LSE, NAN), ValueError, "value"),
    (lambda: convert.to_sentinel(OUT, LSE, NEG_INF), ValueError, "value"),
    (lambda: convert.to_sentinel(OUT, LSE, -1e300), ValueError, "value"),
    (lambda: convert.from_sentinel(OUT, LSE, -1e300), ValueError, "value"),
    (lambda: convert.from_sentinel(OUT, LSE, None), ValueError, "value"),
    (lambda: convert.from_sentinel(OUT, LSE, -1e30, heads_last=True), ValueError, "lse"),
    (lambda: convert.lse_from_padded(LSE[0], CU_SEQLENS, 5), ValueError, "lse"),
    (lambda: convert.lse_from_padded(LSE, CU_SEQLENS.to("meta"), 5), ValueError, "cu_seqlens"),
    (lambda: convert.lse_from_padded(LSE, CU_SEQLENS.tolist(), 5), TypeError, "cu_seqlens"),
    (lambda: convert.lse_from_padded(LSE, CU_SEQLENS.float(), 5), TypeError, "cu_seqlens"),
    (lambda: convert.lse_from_padded(None, CU_SEQLENS, 5), TypeError, "lse"),
    (lambda: convert.lse_to_padded(LSE, CU_SEQLENS, 5), ValueError, "lse"),
    (lambda: convert.lse_to_padded(LSE[0], CU_SEQLENS.tolist(), 5), TypeError, "cu_seqlens"),
    (lambda: convert.lse_to_padded(LSE[0], CU_SEQLENS[:0], 5), ValueError, "cu_seqlens"),
    (lambda: convert.lse_to_padded(LSE[0, :, :0], CU_SEQLENS[:0], 5), ValueError, "cu_seqlens"),
]


@pytest.mark.parametrize(("call", "error", "argument"), BAD)
def test_bad_arguments_are_named(call, error, argument):
    with pytest.raises(error, match=rf"^{argument}: got .*accepted"):
        call()


@given(seed=st.integers(0, 1000))
def test_any_mix_of_sources_merges_as_it_is(seed):
    """Three states, each by way of another library: the merge is the merge of the states."""
    states = [state((5,), seed=seed + i, kinds=(0.5, 0.05)) for i in range(3)]
    ways = ("fa2", "flashinfer", "flashmla")
    converted = [
        ROUND_TRIPS[w][1](*ROUND_TRIPS[w][0](*s)) for w, s in zip(ways, states, strict=True)
    ]
    got = neginf.merge_states(*zip(*converted, strict=True))
    outs, lses = (torch.stack(tensors) for tensors in zip(*states, strict=True))
    exact = oracle.merge(outs, lses)
    for name, g, e in zip(("out", "lse"), got, exact, strict=True):
        judge.assert_special_positions_equal(g, e, name)
        torch.testing.assert_close(g, e, rtol=1e-13, atol=1e-13, equal_nan=True)
