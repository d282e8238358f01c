"""Shared prefixes and chunks: equal to one call on the concatenated keys, forward and backward."""

import itertools
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import judge
import neginf
import oracle
from neginf import CascadeLevel
from problems import (
    Inputs,
    Problem,
    check_gradient,
    check_state,
    cumulative,
    int32,
    poisoned_allocations,
)
from targets import runs_on

NEG_INF = float("-inf")
FULL = ("float64", "float32")
FORWARD = ("forward", "combine")
BOTH = (*FORWARD, "backward", "combine_backward")


def check(inputs, attend, gradients):
    """`attend(q, k, v, **options)` against the oracle of `inputs`, whose keys are concatenated."""
    names = "qkv"
    leaves = {n: inputs.tensor(n).detach().requires_grad_() for n in names}
    options = {n: inputs.options[n] for n in ("softmax_scale", "causal", "softcap")}
    if inputs.problem.sink is not None:
        leaves["sink"] = inputs.options["sink"].to(inputs.device).requires_grad_()
        options["sink"] = leaves["sink"]
    with poisoned_allocations():
        out, lse = attend(*(leaves[n] for n in names), return_lse=True, **options)
        check_state(inputs, out.detach(), lse.detach())
        if not gradients:
            return
        got = torch.autograd.grad(
            [out, lse],
            list(leaves.values()),
            [inputs.tensor("dout"), inputs.dlse.to(inputs.device)],
        )
    exact = inputs.reference_gradients(torch.float64)
    low = inputs.reference_gradients(inputs.dtype)
    for name, gradient in zip(leaves, got, strict=True):
        check_gradient(inputs, name, gradient, exact[name], low[name])


def draw_options(data, heads):
    return {
        "heads": heads,
        "heads_k": data.draw(st.sampled_from([1, heads])),
        "causal": data.draw(st.booleans()),
        "head_dim_v": data.draw(st.sampled_from([None, 5])),
        "softcap": data.draw(st.sampled_from([0.0, 2.0])),
        "softmax_scale": data.draw(st.sampled_from([None, 0.3])),
        "sink": data.draw(st.sampled_from([None, (0.5, NEG_INF)])),
        "seed": data.draw(st.integers(0, 1000)),
    }


def in_chunks(ends):
    def attend(q, k, v, **options):
        edges = itertools.pairwise([0, *ends])
        chunks = ((k[:, a:b], v[:, a:b]) for a, b in edges)
        return neginf.chunked_attention(q, chunks, k.shape[1], **options)

    return attend


@runs_on(*FORWARD, dtypes=("float64", "bfloat16"))
@given(data=st.data())
def test_chunks(target, data):
    seqlen_k = data.draw(st.integers(0, 12))
    problem = Problem(
        lengths_q=(data.draw(st.integers(0, 8)),) * 2, lengths_k=(seqlen_k,) * 2,
        **draw_options(data, 2),
    )  # fmt: skip
    ends = sorted(data.draw(st.lists(st.integers(0, seqlen_k), max_size=4)))
    attend = in_chunks([*ends, seqlen_k])
    check(Inputs(problem, target.dtype, target.device), attend, gradients=False)


CHUNKS = {"one": [9], "three": [4, 5, 9], "with empty ones": [0, 4, 4, 9, 9]}


@runs_on(*BOTH, dtypes=FULL)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ends", CHUNKS.values(), ids=CHUNKS)
def test_gradients_of_chunks(target, ends, causal):
    for sink in (None, (0.5, NEG_INF)):
        problem = Problem(lengths_q=(11,), lengths_k=(9,), causal=causal, sink=sink)
        # A row that sees the sink alone is no empty row to a merge, so its dout counts.
        inputs = Inputs(problem, target.dtype, target.device, poison=sink is None)
        check(inputs, in_chunks(ends), gradients=True)


@runs_on("forward", "combine")
def test_no_chunks_at_all(target):
    q = torch.randn(2, 3, 2, 16).to(target.device, target.dtype)
    judge.assert_state(neginf.chunked_attention(q, [], 0, return_lse=True), 0, NEG_INF)
    sink = torch.tensor([0.5, -1.0], device=target.device)
    state = neginf.chunked_attention(q, [], 0, sink=sink, return_lse=True)
    judge.assert_state(state, 0, sink.cpu()[:, None])


@runs_on("forward", "combine", dtypes=("bfloat16", "float16"))
def test_sums_of_chunks_are_not_rounded_in_between(target):
    """64 chunks: the error is that of one call, not of 64 roundings."""
    problem = Problem(lengths_q=(3,), lengths_k=(64,), head_dim=64)
    attend = in_chunks(range(1, 65))
    check(Inputs(problem, target.dtype, target.device), attend, gradients=False)


def test_chunks_are_taken_one_at_a_time():
    """When the next one is made, nothing holds the last one any more."""
    made = []

    def chunk():
        assert all(tensor() is None for tensor in made)
        k, v = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)
        made.extend([weakref.ref(k), weakref.ref(v)])
        return k, v

    neginf.chunked_attention(torch.zeros(1, 1, 1, 8), (chunk() for _ in range(3)), 6)
    assert len(made) == 6


@pytest.mark.parametrize("seqlen_k", [5, 7])
def test_chunks_that_do_not_add_up(seqlen_k):
    with pytest.raises(TypeError, match=r"^q: got NoneType; accepted is a tensor"):
        neginf.chunked_attention(None, [], 0)
    k = torch.zeros(1, 3, 1, 8)
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match=r"^chunks: got 6 keys.*seqlen_k = [57]"):
        neginf.chunked_attention(q, [(k, k), (k, k)], seqlen_k)


def test_chunks_are_checked():
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 3, 1, 8)
    with pytest.raises(TypeError, match=r"^v: got NoneType; accepted is a tensor"):
        neginf.chunked_attention(q, [(k, None)], 3)
    message = r"^chunks: v: got head_dim 4; accepted is that of the first chunk, 8"
    with pytest.raises(ValueError, match=message):
        neginf.chunked_attention(q, [(k, k), (k, k[..., :4])], 6)
    with pytest.raises(ValueError, match=r"^v: got head_dim 9; accepted are 1 to"):
        neginf.chunked_attention(q, [(k, torch.zeros(1, 3, 1, 9))], 3, sink=torch.zeros(1))


class OnePrefix:
    """Inputs of a batch whose first `prefix` keys are the same in all sequences."""

    def __init__(self, problem, prefix, target):
        self.prefix = prefix
        self.inputs = Inputs(problem, target.dtype, target.device, poison=False)
        for name in "kv":
            tensor = self.inputs.tensor(name)
            tensor[:, :prefix] = tensor[:1, :prefix].clone()

    def attend(self, q, k, v, **options):
        return neginf.shared_prefix_attention(
            q, k[0, : self.prefix], v[0, : self.prefix], k[:, self.prefix :], v[:, self.prefix :],
            **options,
        )  # fmt: skip


@runs_on(*FORWARD, dtypes=("float64", "bfloat16"))
@given(data=st.data())
def test_shared_prefix(target, data):
    options = draw_options(data, 2)
    batch, prefix = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 6))
    seqlen_q = data.draw(st.integers(0, 6))
    least = max(0, seqlen_q - 1) if options["causal"] else 0
    own = data.draw(st.integers(least, 8))
    problem = Problem(lengths_q=(seqlen_q,) * batch, lengths_k=(prefix + own,) * batch, **options)
    case = OnePrefix(problem, prefix, target)
    check(case.inputs, case.attend, gradients=False)


@runs_on(*BOTH, dtypes=FULL)
@pytest.mark.parametrize(
    ("prefix", "own", "causal"),
    [(5, 4, True), (5, 3, True), (0, 4, True), (5, 0, False), (0, 0, False), (7, 6, False)],
)
def test_gradients_of_a_shared_prefix(target, prefix, own, causal):
    """The prefix gets the sum of what its copies would get."""
    problem = Problem(
        lengths_q=(4,) * 2, lengths_k=(prefix + own,) * 2, causal=causal, sink=(0.5, NEG_INF)
    )
    case = OnePrefix(problem, prefix, target)
    inputs = case.inputs
    parts = [inputs.tensor(n) for n in "qkv"]
    leaves = [
        parts[0], parts[1][0, :prefix], parts[2][0, :prefix], parts[1][:, prefix:],
        parts[2][:, prefix:], inputs.options["sink"].to(target.device),
    ]  # fmt: skip
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    q, k_prefix, v_prefix, k, v, sink = leaves
    with poisoned_allocations():
        state = neginf.shared_prefix_attention(
            q, k_prefix, v_prefix, k, v, causal=causal, sink=sink, return_lse=True
        )
        got = torch.autograd.grad(
            state, leaves, (inputs.tensor("dout"), inputs.dlse.to(target.device))
        )
    exact = inputs.reference_gradients(torch.float64)
    low = inputs.reference_gradients(target.dtype)

    def of_leaves(gradients):
        return [
            gradients["q"],
            gradients["k"][:, :prefix].sum(0),
            gradients["v"][:, :prefix].sum(0),
            gradients["k"][:, prefix:],
            gradients["v"][:, prefix:],
            gradients["sink"],
        ]

    names = ("q", "k", "v", "k", "v", "sink")
    for name, g, e, r in zip(names, got, of_leaves(exact), of_leaves(low), strict=True):
        check_gradient(inputs, name, g, e, r)


def test_causal_needs_the_keys_of_its_rows():
    q, prefix = torch.zeros(1, 4, 1, 8), torch.zeros(5, 1, 8)
    k = torch.zeros(1, 3, 1, 8)
    neginf.shared_prefix_attention(q, prefix, prefix, k, k, causal=True)
    neginf.shared_prefix_attention(q, prefix, prefix, k[:, :0], k[:, :0])
    with pytest.raises(ValueError, match=r"^k: got 2 keys for 4 rows; accepted with causal"):
        neginf.shared_prefix_attention(q, prefix, prefix, k[:, :2], k[:, :2], causal=True)
    with pytest.raises(ValueError, match=r"^k: got 1 dimensions; accepted is \(batch, seqlen, "):
        neginf.shared_prefix_attention(q, prefix, prefix, k[0, :, 0, 0], k, causal=True)
    for name in ("q", "k_prefix", "v_prefix", "k", "v"):
        arguments = {"q": q, "k_prefix": prefix, "v_prefix": prefix, "k": k, "v": k, name: None}
        with pytest.raises(TypeError, match=rf"^{name}: got NoneType; accepted is a tensor"):
            neginf.shared_prefix_attention(**arguments, causal=True)
    for prefixes, name in (((k, prefix), "k_prefix"), ((prefix, k), "v_prefix")):
        with pytest.raises(ValueError, match=rf"^{name}: got 4 dimensions"):
            neginf.shared_prefix_attention(q, *prefixes, k, k)
    with pytest.raises(ValueError, match=r"^v_prefix: got head_dim 4; accepted is that of v, 8"):
        neginf.shared_prefix_attention(q, prefix, prefix[..., :4], k, k)


def pairs(tensors):
    return list(zip(tensors[::2], tensors[1::2], strict=True))


class Tree:
    """Sequences that share keys level by level.

    `levels` has, for every level but the last, the sequences in each group and each group's number
    of keys; `own` has each sequence's own keys.
    """

    def __init__(self, lengths_q, levels, own, dtype, device="cpu", seed=0, heads=(2, 1), extra=0):
        generator = torch.Generator().manual_seed(seed)
        heads, heads_k = heads

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

        batch, self.dtype, self.device = len(lengths_q), dtype, device
        self.lengths_q = lengths_q
        self.q = normal(sum(lengths_q) + extra, heads, 16)
        self.groups = [*levels, ([1] * batch, own)]
        self.keys = [
            (normal(sum(n), heads_k, 16), normal(sum(n), heads_k, 12)) for _, n in self.groups
        ]
        self.dout, self.dlse = (
            normal(*self.q.shape[:-1], 12),
            torch.randn(heads, self.q.shape[0], generator=generator, dtype=torch.float64),
        )

    def levels(self, keys):
        starts = cumulative(self.lengths_q)
        result = []
        for (members, lengths), (k, v) in zip(self.groups, keys, strict=True):
            cu_seqlens_q = [starts[i] for i in cumulative(members)]
            rows = [b - a for a, b in itertools.pairwise(cu_seqlens_q)]
            result.append(
                CascadeLevel(
                    k, v, int32(cu_seqlens_q, self.device),
                    int32(cumulative(lengths), self.device),
                    max(rows, default=0), max(lengths, default=0),
                )
            )  # fmt: skip
        return result

    def attend(self, q, keys, **options):
        return neginf.cascade_attention(q, self.levels(keys), return_lse=True, **options)

    def reference(self, compute, q, keys, *, sink=None, **options):
        """One sequence at a time, on the concatenation of its levels."""
        softmax_dtype = torch.promote_types(compute, torch.float32)
        outs = [torch.zeros(0, q.shape[1], 12, dtype=compute)]
        lses = [q.new_zeros(q.shape[1], 0).to(softmax_dtype)]
        rows = cumulative(self.lengths_q)
        for i, (a, b) in enumerate(itertools.pairwise(rows)):
            k, v = (
                torch.cat([self.part(level, i, keys[level][n]) for level in range(len(keys))])
                for n in (0, 1)
            )
            out, lse = oracle.attention(
                q[None, a:b], k[None], v[None], compute=compute,
                sink=None if sink is None else sink.to(softmax_dtype), **options,
            )  # fmt: skip
            outs.append(out[0])
            lses.append(lse[0])
        extra = q.shape[0] - rows[-1]
        outs.append(torch.zeros(extra, q.shape[1], 12, dtype=compute))
        lses.append(torch.full((q.shape[1], extra), NEG_INF, dtype=softmax_dtype))
        return torch.cat(outs), torch.cat(lses, -1)

    def part(self, level, sequence, tensor):
        members, lengths = self.groups[level]
        group = sum(end <= sequence for end in cumulative(members)[1:])
        begin = cumulative(lengths)[group]
        return tensor[begin : begin + lengths[group]]


TREES = {
    "two levels": ([1, 3, 2], [([3], [6])], [4, 3, 2]),
    "three levels": ([1, 3, 2, 1], [([4], [5]), ([2, 2], [3, 4])], [1, 3, 2, 0]),
    "groups without keys": ([2, 1, 2], [([3], [0]), ([1, 2], [0, 3])], [2, 0, 2]),
    "sequences without rows": ([0, 2, 0], [([2, 1], [3, 2])], [4, 2, 0]),
    "groups without members": ([1, 2], [([0, 2, 0], [3, 2, 1])], [1, 2]),
    "no keys": ([1, 1], [([2], [0])], [0, 0]),
    "no sequences": ([], [([], [])], []),
    "one level": ([2, 3], [], [2, 4]),
}


def assert_states_close(got, exact, low):
    judge.assert_close(got[0], exact[0], low[0], "out", size=3.0, sum_size=8.0)
    judge.assert_close(got[1], exact[1], low[1], "lse", sum_size=8.0)


@runs_on(*FORWARD)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_cascade(target, name, causal):
    tree = Tree(*TREES[name], target.dtype, target.device, extra=2)
    for sink in (None, torch.tensor([0.5, NEG_INF])):
        options = {"causal": causal, "softcap": 2.0, "softmax_scale": 0.4}
        lse_dtype = torch.promote_types(target.dtype, torch.float32)
        on_device = None if sink is None else sink.to(target.device, lse_dtype)
        with poisoned_allocations():
            got = tree.attend(tree.q, tree.keys, sink=on_device, **options)
        q, keys = tree.q.cpu(), [(k.cpu(), v.cpu()) for k, v in tree.keys]
        exact = tree.reference(torch.float64, q, keys, sink=sink, **options)
        low_out = tree.reference(target.dtype, q, keys, sink=sink, **options)[0]
        low_lse = tree.reference(lse_dtype, q, keys, sink=sink, **options)[1]
        assert_states_close(got, exact, (low_out, low_lse))


@runs_on(*BOTH, dtypes=FULL)
@pytest.mark.parametrize("name", TREES)
def test_gradients_of_a_cascade(target, name):
    tree = Tree(*TREES[name], target.dtype, target.device, extra=1)
    tensors = [tree.q, *itertools.chain(*tree.keys)]

    def gradients(function, dtype, device):
        leaves = [t.to(device, dtype, copy=True).requires_grad_() for t in tensors]
        keys = pairs(leaves[1:])
        out, lse = function(leaves[0], keys, causal=True)
        if not out.requires_grad:  # the reference of no sequences depends on nothing
            return [torch.zeros_like(t) for t in leaves]
        empty = lse == NEG_INF
        dout = torch.where(empty.T[..., None], float("nan"), tree.dout.to(device))
        dlse = torch.where(empty, float("nan"), tree.dlse.to(device))
        return torch.autograd.grad(
            [out, lse], leaves, [dout.to(out.dtype), dlse.to(lse.dtype)],
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip

    with poisoned_allocations():
        got = gradients(tree.attend, target.dtype, target.device)

    def reference(compute):
        return gradients(lambda *a, **o: tree.reference(compute, *a, **o), compute, "cpu")

    exact, low = reference(torch.float64), reference(target.dtype)
    for i, (g, e, r) in enumerate(zip(got, exact, low, strict=True)):
        judge.assert_close(
            g, e, r, f"gradient {i}", factor=judge.GRADIENT_FACTOR, dtype=target.dtype,
            sum_size=8 * max(1.0, judge.largest(e)),
        )  # fmt: skip
        judge.assert_zero(g.cpu()[e == 0], f"gradient {i} where it is 0")


def test_levels_are_checked():
    q = torch.zeros(4, 1, 8)
    k = torch.zeros(4, 1, 8)
    prefix = (k, k, int32([0, 4], "cpu"), int32([0, 4], "cpu"), 4, 4)
    own = (k, k, int32([0, 1, 4], "cpu"), int32([0, 3, 4], "cpu"), 3, 3)
    neginf.cascade_attention(q, [prefix, own])
    message = r"^levels\[-1\]: got 1 keys for the 3 rows of group 1; accepted with causal"
    with pytest.raises(ValueError, match=message):
        neginf.cascade_attention(q, [prefix, own], causal=True)
    with pytest.raises(TypeError, match=r"^cu_seqlens_q: got list; accepted is a tensor"):
        neginf.cascade_attention(q, [(k, k, [0, 4], *prefix[3:])], causal=True)
    narrow = (k, k[..., :4], *own[2:])
    message = r"^levels\[1\].v: got head_dim 4; accepted is that of levels\[0\].v, 8"
    with pytest.raises(ValueError, match=message):
        neginf.cascade_attention(q, [prefix, narrow])
    with pytest.raises(ValueError, match=r"^levels: got none"):
        neginf.cascade_attention(q, [])


@runs_on("forward", "combine", dtypes=("float32", "bfloat16"))
def test_compiles_without_a_graph_break(target):
    tree = Tree(*TREES["three levels"], target.dtype, target.device)

    def function(q, *keys):
        return tree.attend(q, pairs(keys), causal=True)

    torch._dynamo.reset()
    tensors = [tree.q, *itertools.chain(*tree.keys)]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*tensors), function(*tensors), strict=True):
        judge.assert_bits_equal(got, expected, "compiled")
