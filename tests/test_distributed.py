"""Attention over sequences and caches that are spread over ranks: equal to one process."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import judge
import neginf
import oracle
from neginf.distributed import (
    SequenceSharding,
    all_gather_attention,
    decode_attention,
    merge_over_ranks,
    ring_attention,
)
from problems import (
    Guarded,
    Inputs,
    Problem,
    check_gradient,
    check_state,
    int32,
    poisoned_allocations,
)
from ranks import TWO_GPUS, dtype_here, here, lse_dtype_here

NEG_INF = float("-inf")
ATTENTION = {"ring": ring_attention, "all_gather": all_gather_attention}
only_gpus = pytest.mark.parametrize("ranks", [TWO_GPUS], indirect=True)


def assert_about_equal(got, expected):
    """Two means of the same values, each rounded for itself."""
    size = judge.largest(expected)  # under a causal mask the first row is a value
    rounding = judge.rounding_floor(expected.dtype, size, sum_size=max(1.0, size))
    torch.testing.assert_close(got, expected, rtol=0, atol=2 * rounding)


def shardings(problem, placement):
    # What Inputs takes for the length of a dense batch without sequences stands beside each.
    for lengths, default in ((problem.lengths_q, 3), (problem.lengths_k, 4)):
        lengths = list(lengths) if problem.varlen else max(lengths, default=default)
        yield SequenceSharding(lengths, placement=placement)


def on_a_rank(problem, dtype, method, placement, poison):
    """Runs on each rank: out, lse and gradients of the whole sequences, by name."""
    inputs = Inputs(problem, dtype, here(), poison)
    queries, keys = shardings(problem, placement)
    leaves = {
        name: Guarded(sharding.shard(inputs.tensor(name)), here()).view.requires_grad_()
        for name, sharding in (("q", queries), ("k", keys), ("v", keys))
    }
    options = {"deterministic": problem.deterministic, "return_lse": True}
    for name in ("causal", "window_size", "softcap", "softmax_scale"):
        options[name] = inputs.options[name]
    if problem.sink is not None:
        leaves["sink"] = inputs.options["sink"].to(here()).requires_grad_()
        options["sink"] = leaves["sink"]
    with poisoned_allocations():
        q, k, v = (leaves[name] for name in "qkv")
        results = ATTENTION[method](q, k, v, queries, keys, **options)
        given = queries.shard(inputs.tensor("dout")), queries.shard(inputs.dlse.to(here()), -1)
        gradients = torch.autograd.grad(results, list(leaves.values()), given)
    out, lse = (result.detach() for result in results)
    assert lse.is_contiguous()
    whole = {"out": queries.unshard(out), "lse": queries.unshard(lse, -1)}
    for name, gradient in zip(leaves, gradients, strict=True):
        if name == "sink":
            dist.all_reduce(gradient)
            whole[name] = gradient
        else:
            whole[name] = (queries if name == "q" else keys).unshard(gradient)
    inputs.assert_inputs_unchanged()
    return {name: tensor.cpu() for name, tensor in whole.items()}


def check(ranks, problem, method, placement="zigzag", dtype=torch.float64, poison=True):
    dtype = torch.bfloat16 if ranks.device == "cuda" else dtype
    first, *others = ranks.run(on_a_rank, problem, dtype, method, placement, poison)
    for other in others:
        for name, tensor in first.items():
            judge.assert_bits_equal(other[name], tensor, name)
    inputs = Inputs(problem, dtype, poison=poison)
    check_state(inputs, first.pop("out"), first.pop("lse"))
    exact = inputs.reference_gradients(torch.float64)
    low = inputs.reference_gradients(dtype)
    for name, gradient in first.items():
        check_gradient(inputs, name, gradient, exact[name], low[name])
    judge.assert_zero(first["q"][~inputs.used_q], "dq of rows without keys")
    for name in "kv":
        judge.assert_zero(first[name][~inputs.used_k], f"d{name} of unseen keys")


DENSE = Problem(lengths_q=(21,) * 2, lengths_k=(21,) * 2, heads=4, heads_k=2)
PACKED = Problem(lengths_q=(7, 0, 12, 1), lengths_k=(7, 0, 12, 1), varlen=True, heads=4)
PROBLEMS = {
    "dense": DENSE,
    "dense causal": DENSE.with_(causal=True),
    "dense window": DENSE.with_(window_size=(4, 0)),
    "dense window of both sides": DENSE.with_(window_size=(2, 1)),
    "dense window to the right": DENSE.with_(window_size=(-1, 2)),
    "dense diagonal": DENSE.with_(window_size=(0, 0)),
    "more keys": DENSE.with_(lengths_q=(5,) * 2, causal=True),
    "more keys than anyone sees": DENSE.with_(lengths_q=(4,) * 2, window_size=(2, 0)),
    "more rows: the first see no key": DENSE.with_(lengths_k=(4,) * 2, causal=True),
    "more rows, window of both sides": DENSE.with_(lengths_k=(4,) * 2, window_size=(1, 1)),
    "one token": DENSE.with_(lengths_q=(1,), lengths_k=(1,), causal=True),
    "no keys": DENSE.with_(lengths_k=(0,) * 2),
    "no rows": DENSE.with_(lengths_q=(0,) * 2),
    "nothing": DENSE.with_(lengths_q=(0,), lengths_k=(0,)),
    "no batch": DENSE.with_(lengths_q=(), lengths_k=()),
    "packed": PACKED,
    "packed causal": PACKED.with_(causal=True),
    "packed window": PACKED.with_(window_size=(3, 0)),
    "packed window of both sides": PACKED.with_(window_size=(2, 1)),
    "packed cross": PACKED.with_(lengths_k=(3, 5, 20, 0), causal=True),
    "packed cross window": PACKED.with_(lengths_k=(3, 5, 20, 0), window_size=(6, 2)),
    "packed, no keys": PACKED.with_(lengths_k=(0,) * 4),
    "packed, no tokens": PACKED.with_(lengths_q=(0, 0), lengths_k=(0, 0)),
    "no sequences": PACKED.with_(lengths_q=(), lengths_k=()),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("method", ATTENTION)
def test_equals_one_process(ranks, method, name):
    for placement in ("zigzag", "contiguous"):
        check(ranks, PROBLEMS[name], method, placement)


OPTIONS = {
    "scale and softcap": {"softmax_scale": 0.4, "softcap": 2.0},
    "sink": {"sink": (0.5, NEG_INF, -1.0, 2.0), "lengths_k": (4, 0, 3, 0)},
    "deterministic": {"deterministic": True},
    "one head for all": {"heads": 3, "heads_k": 1, "head_dim": 59},
    "narrower values": {"head_dim": 16, "head_dim_v": 8},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("method", ATTENTION)
def test_options(ranks, method, name):
    check(ranks, PACKED.with_(causal=True, **OPTIONS[name]), method, poison=name != "sink")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ATTENTION)
def test_precision(ranks, method, dtype):
    for problem in (DENSE, PACKED):
        problem = problem.with_(causal=True, head_dim=64)
        check(ranks, problem, method, dtype=dtype)


def with_a_nan(method, lengths):
    """A NaN in a key reaches the rows that see it, on whatever rank they are, and no others."""
    sharding = SequenceSharding(lengths)
    q, k, v = (torch.randn(9, 2, 8).to(here(), dtype_here()) for _ in range(3))
    k[3, 0, 5] = torch.nan
    if not sharding.is_packed:
        q, k, v = q[None], k[None], v[None]
    options = {"causal": True, "window_size": (2, 0), "return_lse": True}
    out, lse = ATTENTION[method](*map(sharding.shard, (q, k, v)), sharding, **options)
    out, lse = sharding.unshard(out), sharding.unshard(lse, -1)
    seen = torch.zeros(9, dtype=torch.bool, device=out.device)
    seen[3:6] = True
    expected = torch.stack([seen, torch.zeros_like(seen)])
    assert torch.equal(lse.isnan().view(2, 9), expected)
    for reached in (out.isnan().all(-1), out.isnan().any(-1)):
        assert torch.equal(reached.view(9, 2).T, expected)


@pytest.mark.parametrize("lengths", [9, [9]], ids=["dense", "packed"])
@pytest.mark.parametrize("method", ATTENTION)
def test_nan(ranks, method, lengths):
    ranks.run(with_a_nan, method, lengths)


def trained_after_inference(method):
    """What was made for a batch in inference mode can be used for training."""
    sharding = SequenceSharding([9, 2])
    q = torch.randn(11, 2, 8, device=here(), dtype=dtype_here(), requires_grad=True)
    with torch.inference_mode():
        parts = [sharding.shard(q)] * 3
        whole = sharding.unshard(ATTENTION[method](*parts, sharding, causal=True))
    parts = [sharding.shard(q)] * 3
    out = ATTENTION[method](*parts, sharding, causal=True)
    assert torch.equal(sharding.unshard(out.detach()), whole)
    torch.autograd.grad(out.sum(), q)


@pytest.mark.parametrize("method", ATTENTION)
def test_training_after_inference(ranks, method):
    ranks.run(trained_after_inference, method)


def random_qkv(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 9, 2, 8, generator=generator).to(dtype) for _ in "qkv"]


def one_gradient_alone(method, use, dtype):
    """Only out or only lse is used, and only q, k or v needs a gradient: in one process, and of
    the ranks."""
    sharding = SequenceSharding(9)
    q, k, v = (t.to(here()) for t in random_qkv(dtype))
    results = []
    for wanted in range(3):
        whole, part = ([t.clone() for t in (q, k, v)], [sharding.shard(t) for t in (q, k, v)])
        gradients = []
        for tensors, function in (
            (whole, neginf.flash_attn_func),
            (part, lambda *a, **o: ATTENTION[method](*a, sharding, **o)),
        ):
            tensors[wanted].requires_grad_()
            state = function(*tensors, causal=True, return_lse=True)
            gradients += torch.autograd.grad(
                state[use].square().sum(), tensors[wanted], allow_unused=True
            )
        one_process, got = gradients
        results.append((one_process.cpu(), sharding.unshard(got).cpu()))
    return results


def gradient_alone_in(compute, dtype, wanted, use):
    tensors = [t.to(compute).requires_grad_() for t in random_qkv(dtype)]
    state = oracle.attention(*tensors, compute=compute, causal=True)
    return torch.autograd.grad(
        state[use].square().sum(), tensors[wanted], allow_unused=True, materialize_grads=True
    )[0]


def judge_gradient_alone(gradient, dtype, wanted, use):
    """What rounding may do follows from the largest gradient and the largest score."""
    exact, low = (gradient_alone_in(c, dtype, wanted, use) for c in (torch.float64, dtype))
    q, k, _ = (t.double() for t in random_qkv(dtype))
    score_size = (q.norm(dim=-1).max() * k.norm(dim=-1).max()).item() * q.shape[-1] ** -0.5
    sum_size = (1.0 + score_size) * max(1.0, judge.largest(exact))
    judge.assert_close(
        gradient, exact, low, f"d{'qkv'[wanted]}", factor=judge.GRADIENT_FACTOR, sum_size=sum_size
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("use", [0, 1], ids=["out", "lse"])
@pytest.mark.parametrize("wanted", range(3), ids="qkv")
def test_the_judge_sees_a_gradient_that_is_one_per_cent_off(wanted, use, dtype):
    gradient = gradient_alone_in(torch.float64, dtype, wanted, use).to(dtype)
    judge_gradient_alone(gradient, dtype, wanted, use)
    if judge.largest(gradient) > 0:  # lse does not depend on v
        with pytest.raises(AssertionError, match="allowed"):
            judge_gradient_alone(gradient * 1.01, dtype, wanted, use)


@pytest.mark.parametrize("single", [False, True], ids=["", "float32"])
@pytest.mark.parametrize("use", [0, 1], ids=["out", "lse"])
@pytest.mark.parametrize("method", ATTENTION)
def test_one_gradient_alone(ranks, method, use, single):
    dtype = torch.float32 if single else torch.float64
    if ranks.device == "cuda":
        dtype = torch.float16 if single else torch.bfloat16
    results = ranks.run(one_gradient_alone, method, use, dtype)[0]
    for wanted, gradients in enumerate(results):
        for gradient in gradients:
            judge_gradient_alone(gradient, dtype, wanted, use)


def with_a_sink_of_inf(method):
    """The same as in one process: NaN where it is, in the gradients too, and only there."""
    torch.manual_seed(0)
    sharding = SequenceSharding([9, 2])
    keys = SequenceSharding([9, 0])  # and rows without keys
    lengths = [int32([0, *itertools.accumulate(s.lengths)], here()) for s in (sharding, keys)]
    q, k, v = (torch.randn(n, 3, 8).to(here(), dtype_here()) for n in (11, 9, 9))
    sink = torch.tensor([torch.inf, 0.5, NEG_INF], device=here(), dtype=lse_dtype_here())

    def results(function, *tensors):
        leaves = [t.clone().requires_grad_() for t in (*tensors, sink)]
        state = function(*leaves[:3], sink=leaves[3], causal=True, return_lse=True)
        gradients = torch.autograd.grad(state[0].sum() + state[1][:2].sum(), leaves)
        return [t.detach() for t in (*state, *gradients)]

    expected = results(
        lambda *a, **o: neginf.flash_attn_varlen_func(*a, *lengths, 9, 9, **o), q, k, v
    )
    parts = sharding.shard(q), keys.shard(k), keys.shard(v)
    out, lse, dq, dk, dv, dsink = results(
        lambda *a, **o: ATTENTION[method](*a, sharding, keys, **o), *parts
    )
    dist.all_reduce(dsink)
    got = (
        sharding.unshard(out), sharding.unshard(lse, -1), sharding.unshard(dq),
        *map(keys.unshard, (dk, dv)), dsink,
    )  # fmt: skip
    for one, other in zip(got, expected, strict=True):
        judge.assert_special_positions_equal(one, other, method)
    assert got[0][:, 0].isnan().all()
    assert not got[0][:, 1:].isnan().any()


@pytest.mark.parametrize("method", ATTENTION)
def test_a_sink_of_inf(ranks, method):
    ranks.run(with_a_sink_of_inf, method)


def second_derivative(method):
    """Is refused, also where dout is a constant."""
    sharding = SequenceSharding(9)
    leaves = [
        torch.randn(1, sharding.num_tokens, 2, 8).to(here(), dtype_here()).requires_grad_()
        for _ in "qkv"
    ]
    out = ATTENTION[method](*leaves, sharding, causal=True)
    gradients = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    for gradient in gradients:
        with pytest.raises(NotImplementedError, match=r"^second derivatives of attention over"):
            torch.autograd.grad(gradient.sum() + out.sum(), leaves, retain_graph=True)


@pytest.mark.parametrize("method", ATTENTION)
def test_second_derivatives(ranks, method):
    ranks.run(second_derivative, method)


def in_groups(method):
    """Groups of other kinds than all ranks, and ranks whose number in the group is another."""
    size = dist.get_world_size()
    mesh = init_device_mesh(here().split(":")[0], (1, size), mesh_dim_names=("dp", "cp"))
    last = dist.new_group([size - 1])
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 8).to(here(), dtype_here()) for _ in range(3))
    results = [neginf.flash_attn_func(q, k, v, causal=True)]
    groups = [None, mesh["cp"], mesh["cp"].get_group()]
    if dist.get_rank() == size - 1:
        groups.append(last)
    for group in groups:
        sharding = SequenceSharding(9, group)
        out = ATTENTION[method](*map(sharding.shard, (q, k, v)), sharding, causal=True)
        results.append(sharding.unshard(out))
    for group, error, message in (
        (mesh, ValueError, r"group: got a DeviceMesh of 2 dimensions; accepted is one dimension"),
        ("cp", TypeError, r"group: got str; accepted is None, a ProcessGroup or a DeviceMesh"),
    ):
        with pytest.raises(error, match=message):
            SequenceSharding(9, group)
    if dist.get_rank() != size - 1:
        with pytest.raises(ValueError, match=r"group: got a group without this rank"):
            SequenceSharding(9, last)
    return [result.cpu() for result in results]


@pytest.mark.parametrize("method", ATTENTION)
def test_groups(ranks, method):
    for expected, *results in ranks.run(in_groups, method):
        for got in results:
            assert_about_equal(got, expected)


def moved(lengths, placement):
    sharding = SequenceSharding(lengths, placement=placement)
    total = sum(lengths) if sharding.is_packed else lengths
    tokens = torch.arange(2 * total, device=here(), dtype=torch.float32)
    tensor = tokens.view(total, 2) if sharding.is_packed else tokens.view(2, total)
    part = sharding.shard(tensor)
    lse = tensor.T if sharding.is_packed else tensor[:, None]
    assert torch.equal(sharding.unshard(part), tensor)
    assert torch.equal(sharding.unshard(sharding.shard(lse, -1), -1), lse)
    assert sum(sharding.local_lengths()) == sharding.num_tokens == sharding.positions().numel()
    starts = [0, *itertools.accumulate(sharding.lengths)]
    sequence = torch.repeat_interleave(
        torch.arange(len(sharding.lengths)), torch.tensor(sharding.local_lengths(), dtype=int)
    )
    rows = torch.tensor(starts)[sequence] + sharding.positions()
    assert torch.equal(tensor.cpu().index_select(0 if sharding.is_packed else 1, rows), part.cpu())
    return sharding.num_tokens


@pytest.mark.parametrize("placement", ["zigzag", "contiguous"])
@pytest.mark.parametrize("lengths", [0, 1, 17, [], [0], [5, 0, 8], [1, 1]], ids=str)
def test_sharding(ranks, lengths, placement):
    tokens = ranks.run(moved, lengths, placement)
    assert sum(tokens) == (lengths if isinstance(lengths, int) else sum(lengths))
    if isinstance(lengths, int):
        assert max(tokens) - min(tokens) <= 2


def wrong_arguments():
    sharding, packed = SequenceSharding(4), SequenceSharding([4])
    n = sharding.num_tokens
    q = torch.zeros(1, n, 4, 8, device=here(), dtype=torch.bfloat16)
    cases = [
        ((q, q, q, 4), {}, TypeError, r"^queries: got int; accepted is a SequenceSharding"),
        ((q, q, q, sharding, packed), {}, ValueError, r"^keys: got another group or layout"),
        (
            (q[0], q[0], q[0], packed, SequenceSharding([4, 4])), {}, ValueError,
            r"^keys: got 2 sequences; accepted are as many as queries has, 1",
        ),
        ((None, q, q, sharding), {}, TypeError, r"^q: got NoneType; accepted is a tensor"),
        ((q[0], q, q, sharding), {}, ValueError, r"^q: got 3 dimensions; accepted is \(batch"),
        ((q, q, q, packed), {}, ValueError, r"^q: got 4 dimensions; accepted is \(tokens"),
        (
            (q, torch.zeros(1, n + 1, 4, 8), q, sharding), {}, ValueError,
            rf"^k: got {n + 1} tokens in dimension 1 of shape .*; accepted are {n}",
        ),
        ((q, q, q.double(), sharding), {}, TypeError, r"^v: got dtype"),
        ((q, q[:, :, :3], q[:, :, :3], sharding), {}, ValueError, r"^q: got 4 heads"),
        ((q, q, q, sharding), {"softcap": -1.0}, ValueError, r"^softcap: got -1"),
        ((q, q, q, sharding), {"window_size": 3}, ValueError, r"^window_size: got 3"),
        ((q, q, q, sharding), {"window_size": (-2, 0)}, ValueError, r"^window_size: got \(-2, 0"),
        (
            (q, q, q, sharding), {"window_size": (-1, -7), "causal": True}, ValueError,
            r"^window_size: got \(-1, -7\); accepted are values from 0, or -1 for unbounded",
        ),
        (
            (q, q, q, sharding), {"window_size": (1.5, 0)}, TypeError,
            r"^window_size: got \(1.5, 0\); accepted is \(left, right\), two ints",
        ),
        ((q, q, q, sharding), {"sink": [0.0] * 4}, TypeError, r"^sink: got list; accepted is a te"),
        ((q, q, q, sharding), {"sink": torch.zeros(2)}, ValueError, r"^sink: got"),
    ]  # fmt: skip
    for attention, (args, options, error, message) in itertools.product(ATTENTION.values(), cases):
        with pytest.raises(error, match=message):
            attention(*args, **options)
    with pytest.raises(ValueError, match=r"^tensor: got 5 tokens in dimension 1"):
        sharding.shard(torch.zeros(1, 5))
    with pytest.raises(ValueError, match=r"^tensor: got a tensor that needs a gradient"):
        sharding.unshard(q.clone().requires_grad_())
    with pytest.raises(ValueError, match=r"^dim: got 4; accepted is a dimension"):
        sharding.shard(q, 4)
    for move in (sharding.shard, sharding.unshard):
        with pytest.raises(TypeError, match=r"^dim: got 'a'; accepted is an int or None"):
            move(q, dim="a")
    for lengths, error, message in (
        (torch.tensor([3]), TypeError, r"^lengths: got Tensor; accepted is an int"),
        ([3, 2.0], TypeError, r"^lengths: got a float in it"),
        (True, TypeError, r"^lengths: got bool"),
        ([3, -1], ValueError, r"^lengths: got -1; accepted are lengths of 0 or more"),
    ):
        with pytest.raises(error, match=message):
            SequenceSharding(lengths)
    with pytest.raises(ValueError, match=r"^placement: got 'striped'; accepted are \('zigzag'"):
        SequenceSharding(3, placement="striped")
    out, lse = torch.zeros(3, 4, 8), torch.zeros(4, 3)
    if 4 % dist.get_world_size() == 0:
        with pytest.raises(ValueError, match=r"^method: got 'ring'; accepted are \('reduce_sc"):
            merge_over_ranks(out, lse, method="ring")
    else:
        with pytest.raises(ValueError, match=r"^out: got 4 heads; accepted is a multiple"):
            merge_over_ranks(out, lse)
    many = torch.zeros(3, 12, 8), torch.zeros(12, 3)
    for method in ("reduce_scatter", "all_to_all"):
        if dist.get_backend() == "gloo":  # after the messages, which NCCL has for GPUs only
            with pytest.raises(ValueError, match=r"^lse: got \+inf on some rank; accepted are"):
                merge_over_ranks(many[0], torch.full_like(many[1], torch.inf), method=method)
        with pytest.raises(ValueError, match=r"^out: got head_dim 0; accepted is 1 or more"):
            merge_over_ranks(many[0][..., :0], many[1], method=method)
    with pytest.raises(TypeError, match=r"^method: got \[1\]; accepted are \('reduce_scatter'"):
        merge_over_ranks(*many, method=[1])
    with pytest.raises(ValueError, match=r"^sink: got shape \(2,\) on cpu; accepted is \(12,\)"):
        merge_over_ranks(*many, sink=torch.zeros(2))
    for method in ("reduce_scatter", "all_to_all"):
        with pytest.raises(TypeError, match=r"^out: got dtype torch.int32; accepted are float32"):
            merge_over_ranks(many[0].int(), many[1], method=method)
    with pytest.raises(ValueError, match=r"^out: got a tensor that needs a gradient"):
        merge_over_ranks(out.requires_grad_(), lse)
    q, cache = torch.zeros(1, 1, 12, 8), torch.zeros(1, 2, 2, 8)
    for name in "qkv":
        given = {"q": q, "k": cache, "v": cache}
        given[name] = given[name].clone().requires_grad_()
        with pytest.raises(ValueError, match=f"^{name}: got a tensor that needs a gradient"):
            decode_attention(**given)
    # Before anything runs: a cache of another head_dim would be refused by the attention.
    given = {"q": q, "k": cache[..., :4], "v": cache[..., :4]}
    for changes, error, message in (
        ({"q": q[0]}, ValueError, r"^q: got 3 dimensions; accepted are 4"),
        ({"group": "cp"}, TypeError, r"^group: got str"),
        ({"sink": [0.0] * 12}, TypeError, r"^sink: got list; accepted is a floating-point tensor"),
        ({"method": [1]}, TypeError, r"^method: got \[1\]"),
        ({"method": "ring"}, ValueError, r"^method: got 'ring'"),
    ):
        with pytest.raises(error, match=message):
            decode_attention(**{**given, **changes})
    size = dist.get_world_size()
    if size > 1:
        with pytest.raises(ValueError, match=rf"^q: got {size + 1} heads; .* of ranks, {size}$"):
            decode_attention(q.new_zeros(1, 1, size + 1, 8), cache[..., :4], cache[..., :4])


def test_errors(ranks):
    ranks.run(wrong_arguments)


def answered_late(seconds):
    time.sleep(seconds)
    return "late"


def test_an_answer_that_comes_too_late_is_for_nobody(ranks, monkeypatch):
    with monkeypatch.context() as patience:
        patience.setattr("ranks.TIMEOUT_SECONDS", 0.1)
        with pytest.raises(AssertionError, match="does not answer"):
            ranks.run(answered_late, 1)
    assert ranks.run(dist.get_rank) == list(range(ranks.size))


def test_without_process_groups(tmp_path):
    with pytest.raises(ValueError, match=r"^group: got a program without process groups"):
        SequenceSharding(3)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharding = SequenceSharding(3)
        tensor = torch.zeros(1, 3)
        assert torch.equal(sharding.unshard(tensor), tensor)
    finally:
        dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"^group: got one that has been destroyed"):
        sharding.unshard(tensor)


def without_a_sync(method, lengths):
    sharding = SequenceSharding(lengths)
    shape = (sharding.num_tokens, 4, 64)
    shape = shape if sharding.is_packed else (1, *shape)
    leaves = [
        torch.randn(shape, device=here(), dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
    ]
    for mode in ("default", "error"):  # the first call loads kernels and connects ranks
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out = ATTENTION[method](*leaves, sharding, causal=True)
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def on_two_streams():
    """Indices that one stream copies late are waited for by another that uses them."""
    tokens = 4096
    tensor = torch.randn(tokens, 8, device=here())
    expected = SequenceSharding([tokens]).shard(tensor)
    sharding = SequenceSharding([tokens])
    first, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        # What an early use would read is zeros, which are indices, and wrong ones.
        zeros = [torch.zeros(tokens, dtype=torch.int64, device=here()) for _ in range(8)]
    torch.cuda.synchronize()
    del zeros
    with torch.cuda.stream(first):
        torch.cuda._sleep(10**9)
        sharding.shard(tensor)
    with torch.cuda.stream(other):
        got = sharding.shard(tensor)
    torch.cuda.synchronize()
    assert torch.equal(got, expected)


@only_gpus
def test_streams(ranks):
    ranks.run(on_two_streams)


@only_gpus
@pytest.mark.parametrize("lengths", [70, [40, 0, 31]], ids=["dense", "packed"])
@pytest.mark.parametrize("method", ATTENTION)
def test_no_sync(ranks, method, lengths):
    ranks.run(without_a_sync, method, lengths)
