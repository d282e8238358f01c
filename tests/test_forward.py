"""The dense forward against the oracle."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import judge
import neginf
import oracle
from neginf import _C
from problems import NARROWER_VALUES, Guarded, Inputs, Problem, check_forward, problems
from targets import HALF, runs_on

NEG_INF = float("-inf")


@runs_on("forward", "combine")
@given(data=st.data())
def test_any_problem(target, data):
    problem = data.draw(problems(target.head_dims(1, 8, 16, 40, 59, 64, 96, 128, 192, 256)))
    splits = data.draw(st.sampled_from([0, 1, 1, 1, 2, 3]))
    check_forward(Inputs(problem.with_(num_splits=splits), target.dtype, target.device))


@runs_on("forward")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("sq", "sk"),
    [(1, 1), (1, 300), (300, 1), (128, 128), (257, 190), (64, 0), (300, 1100), (600, 520)],
)
def test_lengths(target, sq, sk, causal):
    problem = Problem(lengths_q=(sq,) * 2, lengths_k=(sk,) * 2, head_dim=64, causal=causal)
    out, lse = check_forward(Inputs(problem, target.dtype, target.device))
    rows_without_keys = max(sq - sk, 0) if causal or sk == 0 else 0
    judge.assert_state((out[:, :rows_without_keys], lse[..., :rows_without_keys]), 0, NEG_INF)
    assert lse[..., rows_without_keys:].isfinite().all()


HEAD_DIMS = (1, 2, 3, 7, 8, 16, 31, 32, 59, 64, 72, 80, 96, 100, 128, 192, 255, 256)


@runs_on("forward")
def test_head_dims(target):
    """What the build lacks is left to test_errors.py."""
    built = {d for o, a, _, d in _C.kernels() if (o, a) == ("forward", target.arch)}
    head_dims = target.head_dims(*sorted({*HEAD_DIMS, *built, *(d - 1 for d in built)}))
    assert 64 in head_dims
    for head_dim in head_dims:
        problem = Problem(lengths_q=(40,), lengths_k=(70,), head_dim=head_dim, causal=True)
        check_forward(Inputs(problem, target.dtype, target.device))


@runs_on("forward", "combine")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True, "num_splits": 3},
        {"lengths_q": (5,), "num_splits": 0},
        {"softcap": 2.0, "alibi": "h", "sink": (0.5, NEG_INF, 1.0, -2.0)},
    ],
    ids=str,
)
def test_narrower_values(target, changes):
    for head_dim, head_dim_v in NARROWER_VALUES:
        if head_dim > target.max_head_dim:
            continue
        problem = Problem(
            lengths_q=(300,), lengths_k=(330,), heads=4, heads_k=2, head_dim=head_dim,
            head_dim_v=head_dim_v,
        )  # fmt: skip
        inputs = Inputs(problem.with_(**changes), target.dtype, target.device)
        out, _ = check_forward(inputs)
        assert out.shape[-1] == head_dim_v


@runs_on("forward")
@pytest.mark.parametrize(("heads", "heads_k"), [(1, 1), (4, 4), (6, 2), (8, 1)])
def test_head_groups(target, heads, heads_k):
    problem = Problem(lengths_q=(33,), lengths_k=(65,), heads=heads, heads_k=heads_k, alibi="h")
    check_forward(Inputs(problem, target.dtype, target.device))


@runs_on("forward")
@pytest.mark.parametrize(
    "window_size",
    [(0, 0), (1, 0), (0, 1), (3, 2), (-1, 2), (5, -1), (64, 0), (63, 65), (10**6, 10**6)],
)
@pytest.mark.parametrize(("sq", "sk"), [(40, 170), (170, 40), (1100, 1100)])
def test_windows(target, window_size, sq, sk):
    problem = Problem(lengths_q=(sq,), lengths_k=(sk,), window_size=window_size, head_dim=32)
    check_forward(Inputs(problem, target.dtype, target.device))


@runs_on("forward")
def test_windows_beyond_64_bits_are_unbounded(target):
    inputs = Inputs(Problem(lengths_q=(40,), lengths_k=(70,)), target.dtype, target.device)
    q, k, v = (inputs.tensor(name) for name in "qkv")
    wide = neginf.flash_attn_func(q, k, v, window_size=(2**70, 2**63), return_lse=True)
    unbounded = neginf.flash_attn_func(q, k, v, return_lse=True)
    judge.assert_bits_equal(wide[0], unbounded[0], "out")
    judge.assert_bits_equal(wide[1], unbounded[1], "lse")


@runs_on("forward")
@pytest.mark.parametrize(("left", "right"), [(2, 9), (-1, -1), (7, 0)])
def test_causal_overrides_the_right_side(target, left, right):
    problem = Problem(lengths_q=(50,), lengths_k=(70,), causal=True, window_size=(left, right))
    out, lse = check_forward(Inputs(problem, target.dtype, target.device))
    window = problem.with_(causal=False, window_size=(left, 0))
    same_out, same_lse = check_forward(Inputs(window, target.dtype, target.device))
    judge.assert_bits_equal(out, same_out, "out")
    judge.assert_bits_equal(lse, same_lse, "lse")


@runs_on("forward")
@pytest.mark.parametrize("softcap", [0.5, 1.0, 30.0])
@pytest.mark.parametrize("softmax_scale", [None, 2.0])
def test_softcap(target, softcap, softmax_scale):
    problem = Problem(
        lengths_q=(20,), lengths_k=(90,), softcap=softcap, softmax_scale=softmax_scale, causal=True
    )
    check_forward(Inputs(problem, target.dtype, target.device))


@runs_on("forward")
@pytest.mark.parametrize("alibi", ["h", "bh"])
@pytest.mark.parametrize(("sq", "sk"), [(70, 70), (20, 90), (90, 20)])
def test_alibi(target, alibi, sq, sk):
    problem = Problem(lengths_q=(sq,) * 2, lengths_k=(sk,) * 2, heads=4, heads_k=2, alibi=alibi)
    check_forward(Inputs(problem, target.dtype, target.device))


@runs_on("forward")
def test_sink(target):
    problem = Problem(
        lengths_q=(70,), lengths_k=(66,), heads=4, heads_k=2, causal=True,
        sink=(0.5, -4.0, 9.0, NEG_INF),
    )  # fmt: skip
    out, lse = check_forward(Inputs(problem, target.dtype, target.device))
    # Rows without keys: (0, sink), and a sink of -inf leaves them empty.
    judge.assert_zero(out[:, :4], "rows without keys")
    for head, sink in enumerate(problem.sink):
        assert (lse[0, head, :4] == sink).all()


@runs_on("forward")
def test_sink_of_minus_infinity_changes_nothing(target):
    problem = Problem(lengths_q=(70,), lengths_k=(66,), causal=True)
    plain = check_forward(Inputs(problem, target.dtype, target.device))
    sink = check_forward(Inputs(problem.with_(sink=(NEG_INF,) * 2), target.dtype, target.device))
    judge.assert_bits_equal(sink[0], plain[0], "out")
    judge.assert_bits_equal(sink[1], plain[1], "lse")


@runs_on("forward")
def test_sink_may_have_the_dtype_of_q(target):
    q, k, v = (torch.randn(1, 9, 2, 16).to(target.device, target.dtype) for _ in range(3))
    sink = torch.tensor([0.5, -1.5], device=target.device)
    accumulate = torch.promote_types(target.dtype, torch.float32)
    a = neginf.flash_attn_func(q, k, v, sink=sink.to(target.dtype), return_lse=True)
    b = neginf.flash_attn_func(q, k, v, sink=sink.to(accumulate), return_lse=True)
    judge.assert_bits_equal(a[0], b[0], "out")
    judge.assert_bits_equal(a[1], b[1], "lse")


@runs_on("forward")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (70, 70), (30, 200), (200, 130)])
def test_exact_oracle(target, sq, sk, causal):
    """q = 0: L is ln(number of visible keys), O their mean; integers make the mean exact."""
    q = torch.zeros(1, sq, 2, 32, device=target.device, dtype=target.dtype)
    k = torch.randn(1, sk, 2, 32).to(q)
    v = torch.ones(1, sk, 2, 32).to(q) * torch.tensor([1.0, -2.0]).to(q)[:, None]
    out, lse = neginf.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    counts = oracle.visible(sq, sk, causal).sum(1).double()
    exact = counts.log()
    judge.assert_special_positions_equal(lse[0, 0], exact, "lse")
    has_keys = counts > 0
    error = (lse.cpu().double() - exact)[..., has_keys].abs().max()
    assert error <= 4 * torch.finfo(lse.dtype).eps * (1 + math.log(sk))
    mean = has_keys.double()[None, :, None, None] * v[:, :1].cpu().double()
    assert (out.cpu().double() - mean).abs().max() <= 2 * torch.finfo(target.dtype).eps


@runs_on("forward")
def test_empty_sizes(target):
    for batch, sq, sk in [(0, 5, 6), (2, 0, 6), (2, 0, 0), (2, 5, 0), (0, 0, 0)]:
        q = torch.randn(batch, sq, 4, 16).to(target.device, target.dtype)
        k = torch.randn(batch, sk, 2, 16).to(target.device, target.dtype)
        out, lse = neginf.flash_attn_func(q, k, k, return_lse=True)
        assert out.shape == q.shape
        assert lse.shape == (batch, 4, sq)
        judge.assert_state((out, lse), 0, NEG_INF)


def assert_same(target, got, wanted, what):
    """On the GPU to the bit. On the CPU the order of the sums in a matrix product of ATen depends
    on how its operands lie in memory.
    """
    if target.device != "cpu":
        judge.assert_bits_equal(got, wanted, what)
        return
    judge.assert_special_positions_equal(got, wanted, what)
    seen = wanted.isfinite()
    error = (got - wanted)[seen].abs().max()
    assert error <= 4 * torch.finfo(got.dtype).eps * wanted[seen].abs().max(), what


@runs_on("forward")
def test_any_strides(target):
    """Each of q, k, v with its own strides gives what contiguous tensors give."""
    q, k, v = (torch.randn(2, 37, 2, 24).to(target.device, target.dtype) for _ in range(3))
    expected = neginf.flash_attn_func(q, k, v, causal=True, return_lse=True)
    packed = torch.stack([q, k, v], dim=2)
    variants = {
        "qkv packed": packed.unbind(2),
        "heads before rows": [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)],
        "last dim strided": [t.transpose(1, 3).contiguous().transpose(1, 3) for t in (q, k, v)],
        "batch last": [t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2) for t in (q, k, v)],
        "every second row": [torch.stack([t, t], 2).flatten(1, 2)[:, ::2] for t in (q, k, v)],
        "odd offset": [Guarded(t.cpu(), target.device, 3).view for t in (q, k, v)],
        "mixed": [q, packed[:, :, 1], v.transpose(1, 3).contiguous().transpose(1, 3)],
    }

    for name, tensors in variants.items():
        out, lse = neginf.flash_attn_func(*tensors, causal=True, return_lse=True)
        assert_same(target, out, expected[0], f"{name}: out")
        assert_same(target, lse, expected[1], f"{name}: lse")


@runs_on("forward")
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_broadcast(target, dim):
    """Stride 0: one cache for many queries, one key for all places, one head for all heads."""
    q = torch.randn(3, 9, 2, 16).to(target.device, target.dtype)
    shape = [3, 20, 2, 16]
    shape[dim] = 1
    k = torch.randn(shape).to(target.device, target.dtype).expand(3, 20, 2, 16)
    a = neginf.flash_attn_func(q, k, k, return_lse=True)
    b = neginf.flash_attn_func(q, k.contiguous(), k.contiguous(), return_lse=True)
    assert_same(target, a[0], b[0], "out")
    assert_same(target, a[1], b[1], "lse")


@runs_on("forward")
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 40.0])
def test_scales(target, scale):
    """Near-uniform and near-one-hot weights."""
    problem = Problem(lengths_q=(20,), lengths_k=(50,), softmax_scale=scale, causal=True)
    check_forward(Inputs(problem, target.dtype, target.device))


@runs_on("forward")
def test_what_is_returned(target):
    q = torch.randn(1, 3, 2, 16).to(target.device, target.dtype)
    out = neginf.flash_attn_func(q, q, q)
    assert isinstance(out, torch.Tensor)
    with_lse = neginf.flash_attn_func(q, q, q, return_lse=True)
    assert isinstance(with_lse, tuple)
    assert len(with_lse) == 2
    as_flash_attn = neginf.flash_attn_func(q, q, q, return_attn_probs=True)
    assert len(as_flash_attn) == 3
    assert as_flash_attn[2] is None
    for result in (with_lse, as_flash_attn):
        judge.assert_bits_equal(result[0], out, "out")
        judge.assert_bits_equal(result[1], with_lse[1], "lse")


@runs_on("forward", dtypes=HALF)
def test_long_rows_in_half_precision(target):
    """Many keys: weights and sums must not be kept in 16 bits."""
    problem = Problem(lengths_q=(3,), lengths_k=(5000,), head_dim=32, softmax_scale=0.01)
    check_forward(Inputs(problem, target.dtype, target.device))


@runs_on("forward")
def test_same_bits_every_time(target):
    problem = Problem(lengths_q=(190,) * 2, lengths_k=(200,) * 2, heads=4, heads_k=2, causal=True)
    inputs = Inputs(problem, target.dtype, target.device)
    first = inputs.forward()
    for _ in range(3):
        again = inputs.forward()
        judge.assert_bits_equal(again[0], first[0], "out")
        judge.assert_bits_equal(again[1], first[1], "lse")
