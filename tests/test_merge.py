"""merge_states and flash_attn_combine: the monoid of attention states."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import judge
import neginf
import oracle
from problems import Guarded, Inputs, Problem, check_gradient, check_state, poisoned_allocations
from targets import DTYPES, HALF, runs_on

NEG_INF = float("-inf")
NAN = float("nan")
INF = float("inf")


def accumulate(dtype):
    return torch.promote_types(dtype, torch.float32)


def states(target, splits, lead, heads, head_dim, empty=0.3, seed=0):
    """lead: (batch, seqlen) or (total,). Empty states have NaN for a payload."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(splits, *lead, heads, head_dim, generator=generator)
    lse = 3 * torch.randn(splits, *lead[:-1], heads, lead[-1], generator=generator)
    lse[torch.rand(lse.shape, generator=generator) < empty] = NEG_INF
    out[lse.transpose(-1, -2) == NEG_INF] = NAN
    out, lse = out.to(target.dtype), lse.to(accumulate(target.dtype))
    return out.to(target.device), lse.to(target.device)


def combine(*args, **kwargs):
    with poisoned_allocations():
        return neginf.flash_attn_combine(*args, **kwargs)


def check(got, out_partial, lse_partial, sum_size=1.0):
    exact = oracle.merge(out_partial.cpu(), lse_partial.cpu())
    low = oracle.merge(out_partial.cpu(), lse_partial.cpu(), out_partial.dtype)
    low_lse = oracle.merge(out_partial.cpu(), lse_partial.cpu(), accumulate(out_partial.dtype))[1]
    size = judge.largest(out_partial)
    judge.assert_close(
        got[0], exact[0], low[0].to(got[0].dtype), "out", size=size, sum_size=sum_size
    )
    judge.assert_close(got[1], exact[1], low_lse, "lse", sum_size=1 + judge.largest(lse_partial))


@runs_on("combine")
@given(data=st.data())
def test_any_states(target, data):
    lead = data.draw(st.sampled_from([(7,), (2, 5), (1, 1), (3, 0), (0, 4), (0,), (130,), (2, 67)]))
    out, lse = states(
        target,
        data.draw(st.integers(0, 9)),
        lead,
        data.draw(st.integers(1, 5)),
        data.draw(st.sampled_from([1, 3, 16, 59, 64, 128, 200, 256])),
        data.draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])),
        data.draw(st.integers(0, 1000)),
    )
    check(combine(out, lse), out, lse)


@runs_on("combine")
@pytest.mark.parametrize("splits", [17, 64, 256, 300])
@pytest.mark.parametrize(("rows", "head_dim"), [(3, 8), (3, 64), (3, 256), (1030, 20)], ids=str)
def test_many_splits(target, rows, head_dim, splits):
    """More states than lanes; few rows, which share a block on a GPU, and many, which do not."""
    out, lse = states(target, splits, (rows,), 1, head_dim, empty=0.6)
    lse[..., 0] = NEG_INF
    check(combine(out, lse), out, lse, sum_size=8 * judge.largest(out))


def pieces(lead):
    """The first and the last positions, and some between."""
    return (slice(0, 3), slice(lead[-1] // 2, lead[-1] // 2 + 150), slice(-2, None))


@runs_on("combine", "combine_backward", gpu_only=True)
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("splits", "head_dim", "lead"),
    [
        (1, 40, (3, 4391)),
        (2, 40, (5, 1311)),
        (2, 128, (3, 4391)),
        (2, 136, (13171,)),
        (2, 32, (4391, 3)),
        (3, 72, (6563,)),
        (4, 160, (3, 2201)),
        (8, 40, (6563,)),
        (12, 128, (5, 661)),
    ],
    ids=str,
)
def test_many_rows_are_as_few(target, splits, head_dim, lead, listed):
    """So many that lanes merge several rows together; the last of them do not exist."""
    out, lse = states(target, splits, lead, 10, head_dim)
    dout, dlse = torch.randn_like(out[0]), torch.randn_like(lse[0])

    def run(out, lse, dout, dlse):
        leaves = out.clone().requires_grad_(), lse.clone().requires_grad_()
        with poisoned_allocations():
            if listed:
                merged = neginf.merge_states(*(leaf.unbind() for leaf in leaves))
            else:
                merged = neginf.flash_attn_combine(*leaves)
            return (*merged, *torch.autograd.grad(merged, leaves, (dout, dlse)))

    whole = run(out, lse, dout, dlse)
    tolerance = torch.finfo(target.dtype).eps + 1e-6
    for rows in pieces(lead):
        piece = run(out[..., rows, :, :], lse[..., rows], dout[..., rows, :, :], dlse[..., rows])
        for i, (w, p) in enumerate(zip(whole, piece, strict=True)):
            part = w[..., rows] if i % 2 else w[..., rows, :, :]
            torch.testing.assert_close(part, p, rtol=4 * tolerance, atol=40 * tolerance)
            judge.assert_special_positions_equal(part, p, "a piece")


@runs_on("combine")
def test_identity(target):
    """(0, -inf), with any payload, changes no bit of the other state."""
    out, lse = states(target, 1, (2, 33), 3, 64, empty=0.2)
    for payload in (0.0, NAN, INF, 7.0):
        empty_out = torch.full_like(out, payload)
        empty_lse = torch.full_like(lse, NEG_INF)
        merged = combine(
            torch.cat([empty_out, out, empty_out]), torch.cat([empty_lse, lse, empty_lse])
        )
        exact = oracle.merge(out.cpu(), lse.cpu(), accumulate(target.dtype))
        judge.assert_bits_equal(merged[0].cpu(), exact[0].to(target.dtype), "out")
        judge.assert_bits_equal(merged[1], lse[0], "lse")


@runs_on("combine")
@pytest.mark.parametrize("splits", [0, 1, 2, 5, 33])
def test_all_empty(target, splits):
    out, lse = states(target, splits, (2, 9), 3, 64, empty=1.0)
    judge.assert_state(combine(out, lse), 0, NEG_INF)
    out, lse = states(target, splits, (9,), 3, 64, empty=1.0)
    judge.assert_state(combine(out, lse), 0, NEG_INF)


@runs_on("combine")
def test_commutes_and_associates(target):
    """Same positions of -inf exactly; values to rounding."""
    out, lse = states(target, 4, (2, 20), 2, 32, empty=0.5)
    flat = neginf.merge_states(list(out), list(lse))
    eps = torch.finfo(target.dtype).eps
    for order in itertools.permutations(range(4)):
        shuffled = neginf.merge_states([out[i] for i in order], [lse[i] for i in order])
        state = out[order[0]], lse[order[0]]
        for i in order[1:]:
            state = neginf.merge_states([state[0], out[i]], [state[1], lse[i]])
        for other, slack in ((shuffled, 1), (state, 4)):
            judge.assert_special_positions_equal(other[1], flat[1], "lse")
            judge.assert_special_positions_equal(other[0], flat[0], "out")
            assert judge.max_error(other[1], flat[1].cpu()) <= 1e-5 * slack
            assert judge.max_error(other[0], flat[0].cpu()) <= (8 * eps + 1e-6) * slack


@runs_on("combine")
def test_nan(target):
    out, lse = states(target, 3, (1, 6), 1, 16, empty=0.0)
    lse[0, ..., 1] = NAN  # a NaN lse
    out[1, :, 2, :, 5] = NAN  # a NaN in a payload that counts
    lse[2, ..., 2] = NEG_INF
    lse[:, ..., 3] = NEG_INF  # a NaN lse among empty states
    lse[1, ..., 3] = NAN
    lse[0, ..., 4], lse[1, ..., 4] = 0.0, -1000.0  # weight underflows, and NaN is still seen
    out[1, :, 4] = NAN
    merged_out, merged_lse = combine(out, lse)
    assert merged_lse.isnan().flatten().tolist() == [False, True, False, True, False, False]
    assert merged_out[0, [1, 3, 4]].isnan().all()
    assert merged_out[0, 2, 0].isnan().nonzero().flatten().tolist() == [5]
    assert merged_out[0, [0, 5]].isfinite().all()


@runs_on("combine")
def test_plus_infinity_is_not_empty(target):
    out, lse = states(target, 2, (1, 3), 1, 16, empty=0.0)
    lse[0, ..., 1] = INF
    if target.device == "cpu":
        with pytest.raises(ValueError, match=r"lse_partial.*\+inf"):
            neginf.flash_attn_combine(out, lse)
        return
    merged_out, merged_lse = combine(out, lse)
    assert merged_lse.isnan().flatten().tolist() == [False, True, False]
    assert merged_out[0, 1].isnan().all()


@runs_on("combine")
@pytest.mark.parametrize(
    "values",
    [(-46341.0, -46342.0), (0.0, 200.0), (1.4e11, 1.4e11), (-1e30, -1e30), (3e38, -3e38)],
)
def test_extreme_lse(target, values):
    out = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1, 1).expand(2, 1, 1, 1, 8)
    out = out.to(target.device, target.dtype)
    lse = torch.tensor(values, dtype=accumulate(target.dtype), device=target.device)
    lse = lse.view(2, 1, 1, 1)
    merged = combine(out, lse)
    check(merged, out, lse)
    assert merged[1].isfinite().all()


@runs_on("combine")
def test_any_strides(target):
    """Operands with strides of their own, in buffers full of NaN."""
    out, lse = states(target, 3, (2, 17), 4, 24)
    expected = combine(out, lse)
    outs = {
        "guarded": Guarded(out.cpu(), target.device, 5).view,
        "splits last": out.permute(1, 2, 3, 4, 0).contiguous().permute(4, 0, 1, 2, 3),
        "last dim strided": out.transpose(2, 4).contiguous().transpose(2, 4),
        "heads first": out.transpose(2, 3).contiguous().transpose(2, 3),
    }
    lses = {
        "guarded": Guarded(lse.cpu(), target.device, 5).view,
        "rows before heads": lse.transpose(2, 3).contiguous().transpose(2, 3),
        "splits last": lse.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    }
    for (a, o), (b, s) in itertools.product(outs.items(), lses.items()):
        got = combine(o, s)
        judge.assert_bits_equal(got[0], expected[0], f"out {a}, lse {b}: out")
        judge.assert_bits_equal(got[1], expected[1], f"out {a}, lse {b}: lse")
        assert got[0].is_contiguous()
        assert got[1].is_contiguous()


@runs_on("combine")
@pytest.mark.parametrize("lead", [(2, 17), (17,)], ids=str)
def test_out_argument(target, lead):
    """Written in place, through strides, and nothing beside it."""
    out_partial, lse_partial = states(target, 3, lead, 4, 24)
    expected = combine(out_partial, lse_partial)
    guarded = Guarded(torch.full_like(expected[0], NAN).cpu(), target.device, 5)
    got = combine(out_partial, lse_partial, out=guarded.view)
    assert got[0] is guarded.view
    judge.assert_bits_equal(guarded.view, expected[0], "out")
    judge.assert_bits_equal(got[1], expected[1], "lse")
    guarded.assert_guard_unchanged("out")
    transposed = torch.full_like(expected[0].transpose(0, -2).contiguous(), NAN).transpose(0, -2)
    combine(out_partial, lse_partial, out=transposed)
    judge.assert_bits_equal(transposed, expected[0], "out with heads first")


@runs_on("combine", dtypes=(*HALF, "float32"))
@pytest.mark.parametrize("partial", [*HALF, "float32"])
def test_out_dtype(target, partial):
    """Every pair of dtypes of partials and result."""
    out, lse = states(target._replace(dtype=DTYPES[partial]), 3, (2, 9), 2, 40)
    merged = combine(out, lse, out_dtype=target.dtype)
    assert merged[0].dtype == target.dtype
    assert merged[1].dtype == torch.float32
    exact = oracle.merge(out.cpu(), lse.cpu())
    low = oracle.merge(out.cpu(), lse.cpu(), torch.float32)[0].to(target.dtype)
    judge.assert_close(merged[0], exact[0], low, "out", size=judge.largest(exact[0]))
    into = torch.empty_like(merged[0])
    combine(out, lse, out=into)
    judge.assert_bits_equal(into, merged[0], "out=")


@runs_on("combine")
def test_merge_states_equals_combine(target):
    for lead in ((2, 17), (17,)):
        out, lse = states(target, 3, lead, 4, 24)
        expected = combine(out, lse)
        for outs, lses in ((list(out), list(lse)), (tuple(out), tuple(lse))):
            got = neginf.merge_states(outs, lses)
            judge.assert_bits_equal(got[0], expected[0], "out")
            judge.assert_bits_equal(got[1], expected[1], "lse")


def assert_sums_equal(got, expected):
    """Of terms that add up to 64 at most, in another order."""
    rounding = 4 * 64 * torch.finfo(accumulate(expected.dtype)).eps
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(got, expected, rtol=2 * eps, atol=rounding)


def strided(tensor, kind):
    """The same values in other memory, amid NaN."""
    if kind == "guarded":
        return Guarded(tensor.cpu(), tensor.device, 5).view
    order = {
        "as it is": range(tensor.dim()),
        "heads first": [tensor.dim() - 2, *range(tensor.dim() - 2), tensor.dim() - 1],
        "last dimension first": [tensor.dim() - 1, *range(tensor.dim() - 1)],
    }[kind]
    back = [list(order).index(i) for i in range(tensor.dim())]
    return tensor.permute(*order).contiguous().permute(*back)


@runs_on("combine", "combine_backward")
@pytest.mark.parametrize("lead", [(2, 17), (17,)], ids=str)
def test_states_of_a_list_have_strides_of_their_own(target, lead):
    out, lse = states(target, 4, lead, 4, 24)
    dout, dlse = torch.randn_like(out[0]), torch.randn_like(lse[0])
    leaves = out.clone().requires_grad_(), lse.clone().requires_grad_()
    expected = neginf.flash_attn_combine(*leaves)
    expected_gradients = torch.autograd.grad(expected, leaves, (dout, dlse))
    kinds = ("guarded", "heads first", "as it is", "last dimension first")
    for first in range(4):
        outs = [strided(o, kinds[i - first]).requires_grad_() for i, o in enumerate(out)]
        lses = [strided(s, kinds[first - i]).requires_grad_() for i, s in enumerate(lse)]
        with poisoned_allocations():
            got = neginf.merge_states(outs, lses)
            gradients = torch.autograd.grad(got, [*outs, *lses], (dout, dlse))
        for g, e, what in zip(got, expected, ("out", "lse"), strict=True):
            judge.assert_bits_equal(g.detach(), e.detach(), what)
        judge.assert_bits_equal(torch.stack(gradients[:4]), expected_gradients[0], "douts")
        # How lanes share the columns of a dot product depends on alignment.
        assert_sums_equal(torch.stack(gradients[4:]), expected_gradients[1])


@runs_on("combine", "combine_backward")
@pytest.mark.parametrize("count", [1, 16, 17, 40, 270])
def test_long_lists(target, count):
    out, lse = states(target, count, (2, 9), 3, 40, empty=0.6)
    lse[..., 0] = NEG_INF
    outs = [o.clone().requires_grad_() for o in out]
    lses = [s.clone().requires_grad_() for s in lse]
    with poisoned_allocations():
        got = neginf.merge_states(outs, lses)
        dout, dlse = torch.randn_like(got[0]), torch.randn_like(got[1])
        gradients = torch.autograd.grad(got, [*outs, *lses], (dout, dlse))
    check([t.detach() for t in got], out, lse, sum_size=8 * judge.largest(out))
    leaves = out.clone().requires_grad_(), lse.clone().requires_grad_()
    stacked = neginf.flash_attn_combine(*leaves)
    expected = torch.autograd.grad(stacked, leaves, (dout, dlse))
    for g, e in zip((gradients[:count], gradients[count:]), expected, strict=True):
        g = torch.stack(g)
        assert_sums_equal(g, e)
        assert torch.equal(g == 0, e == 0)


@runs_on("combine", "combine_backward")
def test_lse_of_a_long_list_alone(target):
    out, lse = states(target, 40, (2, 9), 3, 40, empty=0.6)
    outs, lses = list(out), [s.clone().requires_grad_() for s in lse]
    merged_lse = neginf.merge_states(outs, lses)[1]
    dlse = torch.randn_like(merged_lse)
    gradients = torch.autograd.grad(merged_lse, lses, dlse)
    assert_sums_equal(torch.stack(gradients), dlse * lse.softmax(0).nan_to_num(0.0))


class Operators(TorchDispatchMode):
    """The names of all operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_lists_are_not_copied():
    outs = [torch.randn(5, 2, 8 + i)[..., :8].requires_grad_() for i in range(3)]
    lses = [torch.randn(5, 2).T.requires_grad_() for _ in range(3)]
    with Operators() as operators:
        merged = neginf.merge_states(outs, lses)
    assert operators.names == ["neginf::merge"]
    ones = [torch.ones_like(t) for t in merged]
    with Operators() as operators:
        torch.autograd.grad(merged, [*outs, *lses], ones)
    assert [n for n in operators.names if n not in ("aten::detach", "aten::unbind.int")] == [
        "neginf::merge_backward"
    ]


@runs_on("combine")
def test_one_state_is_itself(target):
    out, lse = states(target, 1, (2, 9), 3, 64, empty=0.0)
    merged = neginf.merge_states([out[0]], [lse[0]])
    judge.assert_bits_equal(merged[0], out[0], "out")
    judge.assert_bits_equal(merged[1], lse[0], "lse")


def gradients(function, out, lse, dout, dlse, uses):
    results = dict(zip(("out", "lse"), function(out, lse), strict=True))
    given = {"out": dout.to(results["out"].dtype), "lse": dlse.to(results["lse"].dtype)}
    return torch.autograd.grad(
        [results[u] for u in uses],
        [out, lse],
        [given[u].to(results[u].device) for u in uses],
        allow_unused=True,
        materialize_grads=True,
    )


@runs_on("combine", "combine_backward")
@pytest.mark.parametrize("uses", [("out", "lse"), ("out",), ("lse",)], ids=str)
@pytest.mark.parametrize(("splits", "lead"), [(4, (2, 19)), (4, (19,)), (70, (7,))], ids=str)
def test_gradients(target, splits, lead, uses):
    out, lse = states(target, splits, lead, 3, 40, empty=0.4)
    lse[:, ..., 0] = NEG_INF  # merged rows that are empty
    out[lse.transpose(-1, -2) == NEG_INF] = NAN
    exact_state = oracle.merge(out.cpu(), lse.cpu())
    dout, dlse = torch.randn(exact_state[0].shape), torch.randn(exact_state[1].shape)
    empty_rows = exact_state[1] == NEG_INF
    assert empty_rows.any()
    dlse[empty_rows] = NAN
    dout = dout.to(target.dtype)
    dout[empty_rows.transpose(-1, -2)] = NAN

    def leaves(dtype, device):
        return (
            out.detach().to(device, dtype).requires_grad_(),
            lse.detach().to(device, accumulate(dtype)).requires_grad_(),
        )

    with poisoned_allocations():
        got = gradients(
            neginf.flash_attn_combine, *leaves(target.dtype, target.device), dout, dlse, uses
        )

    def reference(compute):
        return gradients(
            lambda o, s: oracle.merge(o, s, compute), *leaves(compute, "cpu"), dout, dlse, uses
        )

    exact, low = reference(torch.float64), reference(target.dtype)
    # dlse holds dO . O, and O has been rounded.
    size = 1 + judge.largest(dout) * judge.largest(out.cpu())
    for name, g, e, r, s in zip(("dout", "dlse"), got, exact, low, (1.0, size), strict=True):
        judge.assert_close(
            g, e, r, name, factor=judge.GRADIENT_FACTOR, dtype=target.dtype, size=s, sum_size=6 * s
        )
    empty = lse == NEG_INF
    judge.assert_zero(got[0][empty.transpose(-1, -2)], "dout of empty states")
    judge.assert_zero(got[1][empty], "dlse of empty states")


@runs_on("combine", "combine_backward")
def test_gradients_through_merge_states(target):
    out, lse = states(target, 3, (2, 7), 2, 16, empty=0.0)
    stacked = out.clone().requires_grad_(), lse.clone().requires_grad_()
    merged = neginf.flash_attn_combine(*stacked)
    expected = torch.autograd.grad(merged[0].sum() + merged[1].sum(), stacked)
    outs = [o.clone().requires_grad_() for o in out]
    lses = [s.clone().requires_grad_() for s in lse]
    merged = neginf.merge_states(outs, lses)
    got = torch.autograd.grad(merged[0].sum() + merged[1].sum(), [*outs, *lses])
    judge.assert_bits_equal(torch.stack(got[:3]), expected[0], "douts")
    judge.assert_bits_equal(torch.stack(got[3:]), expected[1], "dlses")


SHARDS = ((0, 7), (7, 7), (7, 30), (30, 40))


def sharded(inputs, q, k, v):
    """Causal attention over each shard: the diagonal of the whole lies `40 - end` to the right."""
    parts = []
    for begin, end in SHARDS:
        keys = slice(begin, end)
        state = inputs.call(q, k[:, keys], v[:, keys], causal=False, window_size=(-1, 40 - end))
        parts.append(state)
    return parts


@runs_on("forward", "combine")
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_attention_over_shards_is_attention(target, softcap):
    problem = Problem(
        lengths_q=(40,), lengths_k=(40,), heads=4, heads_k=2, causal=True, softcap=softcap
    )
    inputs = Inputs(problem, target.dtype, target.device)
    parts = sharded(inputs, *(inputs.tensor(n) for n in "qkv"))
    judge.assert_state(parts[1], 0, NEG_INF, "the shard without keys")
    judge.assert_state((parts[3][0][:, :30], parts[3][1][..., :30]), 0, NEG_INF, "the last shard")
    out, lse = neginf.merge_states(*zip(*parts, strict=True))
    check_state(inputs, out, lse)


@runs_on("forward", "backward", "combine", "combine_backward", dtypes=("float64", "float32"))
def test_gradients_over_shards_are_gradients(target):
    """Split, merged and differentiated: the same as never split, through dL of each part."""
    problem = Problem(lengths_q=(40,), lengths_k=(40,), heads=4, heads_k=2, causal=True)
    inputs = Inputs(problem, target.dtype, target.device)
    leaves = [inputs.tensor(n).detach().requires_grad_() for n in "qkv"]
    with poisoned_allocations():
        out, lse = neginf.merge_states(*zip(*sharded(inputs, *leaves), strict=True))
        got = torch.autograd.grad(
            [out, lse], leaves, [inputs.tensor("dout"), inputs.dlse.to(target.device)]
        )
    exact = inputs.reference_gradients(torch.float64)
    low = inputs.reference_gradients(target.dtype)
    for name, gradient in zip("qkv", got, strict=True):
        check_gradient(inputs, name, gradient, exact[name], low[name])
