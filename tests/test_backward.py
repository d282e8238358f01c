"""Gradients of out and lse against the oracle, and the rows that must not have any."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import judge
import neginf
from problems import NARROWER_VALUES, Inputs, Problem, check_gradients, problems
from targets import runs_on

NEG_INF = float("-inf")
NAN = float("nan")


@runs_on("forward", "backward", "combine")
@given(data=st.data())
def test_any_problem(target, data):
    problem = data.draw(problems(target.head_dims(1, 8, 16, 40, 59, 64, 96, 128, 192, 256)))
    problem = problem.with_(
        deterministic=data.draw(st.booleans()),
        num_splits=data.draw(st.sampled_from([0, 1, 1, 2])),
    )
    uses = data.draw(st.sampled_from([("out", "lse"), ("out",), ("lse",)]))
    check_gradients(Inputs(problem, target.dtype, target.device), uses)


BASE = Problem(lengths_q=(70,) * 2, lengths_k=(66,) * 2, heads=4, heads_k=2, head_dim=32)


@runs_on("forward", "backward")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"window_size": (5, 3)},
        {"window_size": (0, -1)},
        {"softcap": 2.0},
        {"softcap": 2.0, "causal": True, "softmax_scale": 1.0},
        {"alibi": "h"},
        {"alibi": "bh", "causal": True},
        {"sink": (0.5, -2.0, 3.0, NEG_INF)},
        {"sink": (0.5, -2.0, 3.0, NEG_INF), "causal": True},
        {"used_q": (70, 3), "used_k": (0, 50), "causal": True},
        {"used_q": (0, 0)},
        {"heads": 8, "heads_k": 1},
        {"heads": 3, "heads_k": 3},
        {"lengths_k": (0, 0)},
        {"lengths_q": (0, 0)},
        {"lengths_q": (0, 0), "deterministic": True},
        {"lengths_q": (), "lengths_k": ()},
        {"lengths_q": (1, 1), "lengths_k": (300, 300)},
        {"lengths_q": (300, 300), "lengths_k": (1, 1), "causal": True},
        {"head_dim": 59},
        {"head_dim_v": 24, "sink": (0.5, -2.0, 3.0, NEG_INF), "causal": True},
        {"lengths_q": (600,), "lengths_k": (1100,), "causal": True, "softcap": 2.0},
        {"lengths_q": (1100,), "lengths_k": (1100,), "window_size": (20, 3), "alibi": "bh"},
        {
            "lengths_q": (1100,),
            "lengths_k": (600,),
            "causal": True,
            "sink": (0.5, 1.0, 2.0, NEG_INF),
        },
    ],
    ids=str,
)
def test_features(target, changes):
    check_gradients(Inputs(BASE.with_(**changes), target.dtype, target.device))


@runs_on("forward", "backward")
@pytest.mark.parametrize(
    "changes",
    [{}, {"causal": True, "deterministic": True}, {"softcap": 2.0, "alibi": "h"}],
    ids=str,
)
def test_narrower_values(target, changes):
    for head_dim, head_dim_v in NARROWER_VALUES:
        if head_dim > target.max_head_dim:
            continue
        problem = BASE.with_(head_dim=head_dim, head_dim_v=head_dim_v, **changes)
        gradients = check_gradients(Inputs(problem, target.dtype, target.device))
        assert gradients["v"].shape[-1] == head_dim_v


@runs_on("forward", "backward")
@pytest.mark.parametrize("uses", [("out",), ("lse",), ("out", "lse")], ids=str)
@pytest.mark.parametrize("sink", [None, (0.5, -2.0, NEG_INF, 1.0)])
def test_each_output_alone(target, uses, sink):
    """A gradient that is not there is zero, not garbage; the gradient through lse is real."""
    problem = BASE.with_(causal=True, sink=sink)
    gradients = check_gradients(Inputs(problem, target.dtype, target.device), uses)
    if uses == ("lse",):
        judge.assert_zero(gradients["v"], "dv of a loss on lse alone")
        assert gradients["k"].abs().max() > 0.01


@runs_on("forward", "backward")
def test_rows_without_keys_have_no_gradient(target):
    """Exact zeros, though their q, dout and dlse are NaN (Inputs fills them)."""
    problem = Problem(lengths_q=(9,), lengths_k=(4,), causal=True)
    inputs = Inputs(problem, target.dtype, target.device)
    assert inputs.tensor("dout")[:, :5].isnan().all()
    assert inputs.tensor("q")[:, :5].isnan().all()
    assert inputs.dlse[..., :5].isnan().all()
    gradients = check_gradients(inputs)
    judge.assert_zero(gradients["q"][:, :5], "dq")


@runs_on("forward", "backward")
def test_rows_without_keys_add_exactly_nothing(target):
    """dk and dv are bit for bit those of the rows that have keys."""
    rows = torch.randn(1, 9, 2, 16).to(target.device, target.dtype)
    k, v, dout = (torch.randn(1, n, 2, 16).to(rows) for n in (4, 4, 9))

    def run(q, dout):
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out, lse = neginf.flash_attn_func(*leaves, causal=True, return_lse=True, deterministic=True)
        return torch.autograd.grad([out, lse], leaves, [dout, torch.ones_like(lse)])

    _, dk, dv = run(rows, dout)
    other, other_dout = rows.clone(), dout.clone()
    other[:, :5] *= 100
    other_dout[:, :5] = 1e4
    _, other_dk, other_dv = run(other, other_dout)
    judge.assert_bits_equal(dk, other_dk, "dk")
    judge.assert_bits_equal(dv, other_dv, "dv")


@runs_on("forward", "backward")
def test_sink_gradient_of_rows_without_keys(target):
    """Such a row has L = sink, so its dL is the sink's gradient, and nobody else's."""
    accumulate = torch.promote_types(target.dtype, torch.float32)
    q = torch.randn(2, 3, 2, 16).to(target.device, target.dtype).requires_grad_()
    k = torch.randn(2, 0, 2, 16).to(q).requires_grad_()
    sink = torch.tensor([0.5, NEG_INF], device=target.device, dtype=accumulate).requires_grad_()
    out, lse = neginf.flash_attn_func(q, k, k, sink=sink, return_lse=True)
    judge.assert_zero(out, "out")
    dlse = torch.randn(lse.shape).to(lse)
    dlse[:, 1] = NAN  # empty rows: ignored
    dq, dk, dsink = torch.autograd.grad(
        [out, lse], [q, k, sink], [torch.randn(out.shape).to(out), dlse]
    )
    judge.assert_zero(dq, "dq")
    assert dk.shape == (2, 0, 2, 16)
    assert dsink[0].item() == pytest.approx(dlse[:, 0].sum().item(), rel=1e-6)
    assert dsink[1] == 0


@runs_on("forward", "backward")
def test_sink_gradient_has_the_dtype_of_the_sink(target):
    q = torch.randn(1, 5, 2, 16).to(target.device, target.dtype)
    accumulate = torch.promote_types(target.dtype, torch.float32)
    exact = None
    for dtype in (accumulate, target.dtype):
        sink = torch.tensor([0.5, -1.0], device=target.device, dtype=dtype).requires_grad_()
        _, lse = neginf.flash_attn_func(q, q, q, sink=sink, return_lse=True)
        (dsink,) = torch.autograd.grad(lse.sum(), sink)
        assert dsink.dtype == dtype
        exact = dsink if exact is None else exact
        assert torch.allclose(dsink.to(exact), exact, rtol=torch.finfo(dtype).eps)


@runs_on("forward", "backward")
def test_deterministic_gives_the_same_bits(target):
    problem = BASE.with_(
        lengths_q=(257,) * 2, lengths_k=(300,) * 2, deterministic=True, causal=True
    )
    inputs = Inputs(problem, target.dtype, target.device)
    _, _, first = inputs.gradients()
    for _ in range(3):
        _, _, again = inputs.gradients()
        for name, gradient in again.items():
            judge.assert_bits_equal(gradient, first[name], f"d{name}")


# Each has tiles, and so an order of sums, of its own.
HEAD_DIMS = (64, 96, 128, 192, 256)


@runs_on("forward", "backward", dtypes=("bfloat16", "float16"), gpu_only=True)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True, "heads": 6, "heads_k": 2},
        {"window_size": (200, 50), "softcap": 3.0, "alibi": "bh"},
        {"varlen": True, "lengths_q": (700, 0, 257), "lengths_k": (300, 5, 513), "causal": True},
    ],
    ids=str,
)
def test_hundred_deterministic_backwards(target, changes):
    """Many key tiles add to each row of dq, whatever order the multiprocessors take them in."""
    for head_dim in target.head_dims(*HEAD_DIMS):
        problem = Problem(
            lengths_q=(513,) * 3, lengths_k=(1100,) * 3, head_dim=head_dim, deterministic=True
        ).with_(**changes)
        inputs = Inputs(problem, target.dtype, target.device)
        leaves = [inputs.tensor(n).detach().requires_grad_() for n in "qkv"]
        outputs = inputs.call(*leaves)
        grads = inputs.tensor("dout"), inputs.dlse.to(target.device)
        first = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
        for _ in range(99):
            again = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
            for name, gradient, expected in zip("qkv", again, first, strict=True):
                judge.assert_bits_equal(gradient, expected, f"d{name} at head_dim {head_dim}")


@runs_on("forward", "backward", dtypes=("bfloat16",), gpu_only=True)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lengths_q": (2100,), "lengths_k": (1900,), "causal": True},
        {"heads_k": 2, "window_size": (300, 40)},
        {"used_q": (1029,), "used_k": (650,), "sink": (0.5, -2.0, 3.0, NEG_INF)},
        {"varlen": True, "lengths_q": (1500, 0, 1700, 1229), "lengths_k": (700, 5, 0, 1100)},
    ],
    ids=str,
)
def test_many_rows(target, head_dim, changes):
    """Sequences of many rows have tiles of their own."""
    problem = Problem(lengths_q=(1300,), lengths_k=(700,), heads=4, heads_k=4, head_dim=head_dim)
    check_gradients(Inputs(problem.with_(**changes), target.dtype, target.device))


@runs_on("forward", "backward")
@pytest.mark.parametrize("heads_k", [1, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_every_tile_size(target, heads_k, causal):
    """Several tiles of rows and of keys, the last of each partly filled, and heads in groups."""
    for head_dim in target.head_dims(*HEAD_DIMS):
        problem = Problem(
            lengths_q=(150,), lengths_k=(333,), heads=6, heads_k=heads_k, head_dim=head_dim
        ).with_(causal=causal)
        check_gradients(Inputs(problem, target.dtype, target.device))


def call_backward(q, k, v, out, lse, dout, dlse, scale):
    options = (None,) * 6 + (scale, False, -1, -1, 0.0, None, None, 1, True)
    return torch.ops.neginf.backward(dout, dlse, q, k, v, out, lse, *options)[:3]


@runs_on("forward", "backward")
def test_rows_whose_lse_is_empty_though_the_mask_shows_keys(target):
    """Their q, dout and dlse may be anything: dq is 0, and dk and dv are as without them."""
    q, k, v = (torch.randn(1, n, 2, 64).to(target.device, target.dtype) for n in (100, 150, 150))
    out, lse = neginf.flash_attn_func(q, k, v, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    empty = torch.zeros(100, dtype=torch.bool, device=target.device)
    empty[[0, 33, 64, 99]] = True
    lse[..., empty] = NEG_INF
    expected = call_backward(
        q, k, v, out, lse, dout.masked_fill(empty[:, None, None], 0), dlse, 0.125
    )
    for tensor in (q, dout, out):
        tensor[:, empty] = NAN
    dlse[..., empty] = NAN
    dq, dk, dv = call_backward(q, k, v, out, lse, dout, dlse, 0.125)
    judge.assert_zero(dq[:, empty], "dq of empty rows")
    judge.assert_bits_equal(dq[:, ~empty], expected[0][:, ~empty], "dq")
    judge.assert_bits_equal(dk, expected[1], "dk")
    judge.assert_bits_equal(dv, expected[2], "dv")
    assert dk.isfinite().all()


@runs_on("forward", "backward", dtypes=("float32", "bfloat16"))
@pytest.mark.parametrize("size", [300.0, 133120.0])
def test_backward_of_very_large_and_very_low_scores(target, size):
    """One key takes the whole weight of each row, exactly, beside rows of ordinary size."""
    q = torch.full((1, 70, 1, 64), size).to(target.device, target.dtype)
    k, v = torch.randn(1, 3, 1, 64).to(q) / 8, torch.randn(1, 3, 1, 64).to(q)
    k[:, 1] = size
    k[:, 2] = -size
    q[:, 20:] = 0  # score 0 for every key
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = neginf.flash_attn_func(*leaves)
    dout = torch.zeros_like(out)
    dout[:, :20] = torch.randn(1, 20, 1, 64).to(dout)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    # dP - D is 0 but for the order of its two sums.
    assert dq[:, :20].abs().max() <= 1e-4 * size
    judge.assert_zero(dv[:, [0, 2]], "dv of keys without weight")
    exact = dout[:, :20].double().sum(1)
    error = (dv[:, 1].double() - exact).abs().max()
    assert error <= torch.finfo(target.dtype).eps * (1 + exact.abs().max())
    assert dk.isfinite().all()


@runs_on("forward", "backward")
def test_any_number_of_threads(target):
    """More threads than work, and one: the same gradients to rounding, and none left out."""
    threads = torch.get_num_threads()
    try:
        for count in (1, 7):
            torch.set_num_threads(count)
            check_gradients(Inputs(BASE.with_(causal=True), target.dtype, target.device))
    finally:
        torch.set_num_threads(threads)


@runs_on("forward", "backward")
def test_saved_lse_and_out_are_not_modified(target):
    inputs = Inputs(BASE.with_(causal=True), target.dtype, target.device)
    q, k, v = (inputs.tensor(n).detach().requires_grad_() for n in "qkv")
    out, lse = inputs.call(q, k, v)
    before = out.detach().clone(), lse.detach().clone()
    torch.autograd.grad([out, lse], [q, k, v], [torch.ones_like(out), torch.ones_like(lse)])
    judge.assert_bits_equal(out.detach(), before[0], "out")
    judge.assert_bits_equal(lse.detach(), before[1], "lse")


@runs_on("forward", "backward")
def test_gradients_of_some_inputs(target):
    """Only what is asked for; the others may not require a gradient at all."""
    inputs = Inputs(BASE, target.dtype, target.device)
    _, _, expected = inputs.gradients()
    for name in "qkv":
        tensors = {n: inputs.tensor(n).detach() for n in "qkv"}
        tensors[name].requires_grad_()
        out, lse = inputs.call(**tensors)
        (gradient,) = torch.autograd.grad(
            [out, lse], [tensors[name]], [inputs.tensor("dout"), inputs.dlse.to(lse.device)]
        )
        factor = 1e-12 if target.dtype == torch.float64 else torch.finfo(target.dtype).eps
        error = (gradient.double() - expected[name].double()).abs().max()
        assert error <= 4 * factor * expected[name].abs().max()


@runs_on("forward", "backward")
def test_dout_with_any_strides(target):
    """Expanded (sum().backward()), transposed and strided gradients."""
    inputs = Inputs(
        BASE.with_(causal=True, deterministic=True), target.dtype, target.device, poison=False
    )
    dout = inputs.tensor("dout")

    def run(dout, dlse):
        q, k, v = (inputs.tensor(n).detach().requires_grad_() for n in "qkv")
        out, lse = inputs.call(q, k, v)
        return torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])

    dlse = torch.zeros(2, 4, 70, dtype=inputs.dlse.dtype, device=target.device) + 0.5
    expected = run(dout.contiguous(), dlse)
    for variant in (
        dout.transpose(1, 2).contiguous().transpose(1, 2),
        dout.transpose(1, 3).contiguous().transpose(1, 3),
    ):
        for got, wanted in zip(run(variant, dlse), expected, strict=True):
            judge.assert_bits_equal(got, wanted, "gradient of a strided dout")
    for got, wanted in zip(
        run(dout, dlse[:1, :1, :1].expand(2, 4, 70)), expected, strict=True
    ):  # fmt: skip
        judge.assert_bits_equal(got, wanted, "gradient of an expanded dlse")
    ones = run(torch.ones_like(dout), dlse)
    expanded = run(torch.ones(1).to(dout).expand_as(dout), dlse)
    for got, wanted in zip(expanded, ones, strict=True):
        judge.assert_bits_equal(got, wanted, "gradient of an expanded dout")


@runs_on("forward", "backward")
def test_one_tensor_as_q_k_and_v(target):
    x = torch.randn(1, 20, 2, 16).to(target.device, target.dtype)
    leaf = x.clone().requires_grad_()
    out = neginf.flash_attn_func(leaf, leaf, leaf, causal=True)
    (together,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    out = neginf.flash_attn_func(q, k, v, causal=True)
    apart = torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
    total = sum(g.double() for g in apart)
    eps = 1e-12 if target.dtype == torch.float64 else torch.finfo(target.dtype).eps
    assert (together.double() - total).abs().max() <= 4 * eps * (1 + total.abs().max())


@runs_on("forward", "backward")
def test_no_second_derivative(target):
    """It is not implemented: it must say so, not be silently zero."""
    q = torch.randn(1, 4, 1, 8).to(target.device, target.dtype).requires_grad_()
    out = neginf.flash_attn_func(q, q, q)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradient.sum(), q)


@runs_on("forward")
def test_no_graph_without_gradients(target):
    q = torch.randn(1, 4, 1, 16).to(target.device, target.dtype)
    out, lse = neginf.flash_attn_func(q, q, q, return_lse=True)
    assert not out.requires_grad
    assert not lse.requires_grad
    with torch.no_grad():
        out = neginf.flash_attn_func(q.requires_grad_(), q, q)
    assert not out.requires_grad
    with torch.inference_mode():
        out = neginf.flash_attn_func(q.detach(), q.detach(), q.detach())
    assert out.isfinite().all()
