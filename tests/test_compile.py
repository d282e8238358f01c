"""The operators as torch sees them: opcheck, torch.compile without graph breaks, CUDA graphs."""

import pytest
import torch
from torch.library import opcheck

import judge
import neginf
from problems import Inputs, Problem, int32
from targets import runs_on

ONE_DTYPE = {"dtypes": ("float32", "bfloat16")}


def contiguous(inputs, *names):
    """Copies: opcheck rebuilds its arguments, and cannot do so for empty views of a buffer."""
    return [inputs.tensor(n).clone(memory_format=torch.contiguous_format) for n in names]


def operator_arguments(inputs, **changes):
    """The arguments of torch.ops.neginf.forward, by position."""
    p, options = inputs.problem, {**inputs.options, **changes}

    def tensor(name):
        value = options.get(name)
        return None if value is None else value.to(inputs.device)

    return (
        tensor("cu_seqlens_q"), tensor("cu_seqlens_k"), tensor("seqused_q"), tensor("seqused_k"),
        max(p.lengths_q) if p.varlen else None, max(p.lengths_k) if p.varlen else None,
        p.softmax_scale, p.causal, *p.window_size, p.softcap, tensor("alibi_slopes"),
        tensor("sink"), p.num_splits, p.deterministic,
    )  # fmt: skip


PROBLEMS = {
    "dense": Problem(lengths_q=(9,) * 2, lengths_k=(7,) * 2, causal=True),
    "everything": Problem(
        lengths_q=(9,) * 2, lengths_k=(7,) * 2, softcap=2.0, alibi="bh", sink=(0.5, -1.0),
        used_q=(9, 3), used_k=(0, 7), window_size=(3, 1), num_splits=2, softmax_scale=0.5,
    ),
    "no_keys": Problem(lengths_q=(9,), lengths_k=(0,)),
    "narrower_values": Problem(lengths_q=(9,), lengths_k=(7,), head_dim=24, head_dim_v=9),
    "varlen": Problem(
        lengths_q=(4, 0, 5), lengths_k=(3, 2, 0), varlen=True, extra_q=2, sink=(1.0, 0.0)
    ),
}  # fmt: skip


@runs_on("forward", "backward", "combine", **ONE_DTYPE)
@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_forward(target, name):
    inputs = Inputs(PROBLEMS[name], target.dtype, target.device, poison=False)
    leaves = [t.detach().requires_grad_() for t in contiguous(inputs, *"qkv")]
    sink = inputs.options.get("sink")
    changes = {} if sink is None else {"sink": sink.to(target.device).requires_grad_()}
    opcheck(torch.ops.neginf.forward.default, (*leaves, *operator_arguments(inputs, **changes)))


@runs_on("forward", "combine", **ONE_DTYPE)
@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_forward_without_gradients(target, name):
    inputs = Inputs(PROBLEMS[name], target.dtype, target.device, poison=False)
    tensors = contiguous(inputs, *"qkv")
    opcheck(torch.ops.neginf.forward.default, (*tensors, *operator_arguments(inputs)))


@runs_on("forward", "backward", **ONE_DTYPE)
@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_backward(target, name):
    inputs = Inputs(PROBLEMS[name], target.dtype, target.device, poison=False)
    q, k, v, dout = contiguous(inputs, "q", "k", "v", "dout")
    out, lse = inputs.forward()
    for given in (
        (dout, inputs.dlse.to(target.device)),
        (dout, None),
        (None, torch.ones_like(lse)),
    ):
        opcheck(
            torch.ops.neginf.backward.default,
            (*given, q, k, v, out, lse, *operator_arguments(inputs)),
        )


@runs_on("combine", "combine_backward", **ONE_DTYPE)
@pytest.mark.parametrize("lead", [(2, 5), (5,)], ids=str)
def test_opcheck_combine(target, lead):
    out = torch.randn(3, *lead, 4, 16).to(target.device, target.dtype)
    lse = torch.randn(3, *lead[:-1], 4, lead[-1]).to(target.device)
    ops = torch.ops.neginf
    leaves = out.clone().requires_grad_(), lse.clone().requires_grad_()
    opcheck(ops.combine.default, (*leaves, None))
    opcheck(ops.combine.default, (*leaves, torch.float16))
    opcheck(ops.combine_out.default, (out, lse, torch.empty_like(out[0])))
    merged = neginf.flash_attn_combine(out, lse)
    opcheck(ops.combine_backward.default, (merged[0], merged[1], out, lse))
    opcheck(ops.combine_backward.default, (None, merged[1], out, lse))
    listed = ([o.clone().requires_grad_() for o in out], [s.clone().requires_grad_() for s in lse])
    opcheck(ops.merge.default, (*listed, None))
    opcheck(ops.merge.default, (*listed, torch.float16))
    opcheck(ops.merge_backward.default, (merged[0], merged[1], list(out), list(lse)))
    opcheck(ops.merge_backward.default, (merged[0], None, list(out), list(lse)))


def compiled(function, dynamic):
    """aot_eager traces and functionalises like inductor, and compiles nothing."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")


def check_compiled(function, leaves, eager=None):
    """Same bits and strides as eager, forward and backward."""
    results = []
    for f in (function, eager):
        inputs = [t.detach().clone().requires_grad_() for t in leaves]
        out, lse = f(*inputs)
        gradients = torch.autograd.grad(out.sum() + lse.clamp(min=-1e4).sum(), inputs)
        results.append((out.detach(), lse.detach(), *gradients))
    for got, expected in zip(*results, strict=True):
        assert got.stride() == expected.stride()
        judge.assert_bits_equal(got, expected, "compiled")


@runs_on("forward", "backward", **ONE_DTYPE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_dense(target, dynamic):
    def attend(q, k, v):
        return neginf.flash_attn_func(q, k, v, causal=True, return_lse=True, deterministic=True)

    function = compiled(attend, dynamic)
    for length in (128, 196, 257):
        leaves = [
            torch.randn(2, length, 2, n).to(target.device, target.dtype) for n in (16, 16, 12)
        ]
        check_compiled(function, leaves, attend)
    leaves[1:] = [t[:, :0] for t in leaves[1:]]
    check_compiled(function, leaves, attend)


@runs_on("forward", "combine", **ONE_DTYPE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_forward(target, dynamic):
    def attend(q, k, v):
        return neginf.flash_attn_func(q, k, v, num_splits=2, return_lse=True)

    function = compiled(attend, dynamic)
    for lengths in ((128, 128), (196, 257), (3, 0)):
        q, k, v = (
            torch.randn(2, n, 2, 16).to(target.device, target.dtype)
            for n in (lengths[0], lengths[1], lengths[1])
        )
        got, expected = function(q, k, v), attend(q, k, v)
        judge.assert_bits_equal(got[0], expected[0], "out")
        judge.assert_bits_equal(got[1], expected[1], "lse")


@runs_on("forward", "backward", **ONE_DTYPE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_packed(target, dynamic):
    def attend(q, k, v, cu_seqlens, longest):
        return neginf.flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True, return_lse=True,
            deterministic=True,
        )  # fmt: skip

    function = compiled(attend, dynamic)
    for lengths in ((5, 0, 20), (60, 4, 66)):
        leaves = [
            torch.randn(sum(lengths) + 2, 2, 16).to(target.device, target.dtype) for _ in range(3)
        ]
        cu = int32([0, lengths[0], lengths[0] + lengths[1], sum(lengths)], target.device)
        longest = max(lengths)
        check_compiled(
            lambda q, k, v, cu=cu, n=longest: function(q, k, v, cu, n),
            leaves,
            lambda q, k, v, cu=cu, n=longest: attend(q, k, v, cu, n),
        )


@runs_on("combine", "combine_backward", **ONE_DTYPE)
@pytest.mark.parametrize("count", [3, 17])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_merge(target, dynamic, count):
    def merge(*tensors):
        half = len(tensors) // 2
        return neginf.merge_states(tensors[:half], tensors[half:])

    function = compiled(merge, dynamic)
    for length in (7, 130):
        outs = [torch.randn(2, length, 2, 16).to(target.device, target.dtype) for _ in range(count)]
        lses = [torch.randn(2, 2, length).to(target.device) for _ in range(count)]
        check_compiled(function, [*outs, *lses], merge)


@runs_on("forward", dtypes=("float32", "bfloat16"))
def test_compile_with_all_options(target):
    inputs = Inputs(PROBLEMS["everything"].with_(num_splits=1), target.dtype, target.device)

    def attend(q, k, v):
        return inputs.call(q, k, v)

    tensors = [inputs.tensor(n) for n in "qkv"]
    got, expected = compiled(attend, False)(*tensors), attend(*tensors)
    judge.assert_bits_equal(got[0], expected[0], "out")
    judge.assert_bits_equal(got[1], expected[1], "lse")


def test_fake_tensors_have_the_right_layout():
    """Shapes, dtypes and strides without data."""
    with torch.device("meta"):
        q = torch.empty(2, 3, 9, 16, dtype=torch.bfloat16).transpose(1, 2)
        k = torch.empty(2, 4, 1, 16, dtype=torch.bfloat16)
        out, lse = neginf.flash_attn_func(q, k, k, return_lse=True)
        narrow = neginf.flash_attn_func(q, k, k[..., :4])
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, torch.bfloat16, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 3, 9), torch.float32, True)
    assert (narrow.shape, narrow.is_contiguous()) == ((2, 9, 3, 4), True)


@runs_on("forward", "combine", dtypes=("bfloat16",), gpu_only=True)
@pytest.mark.parametrize("splits", [1, 3, 0])
def test_cuda_graph(target, splits):
    """Captured once, replayed with other contents: lengths too come from device memory."""
    q, k, v = (torch.zeros(2, n, 2, 64).to(target.device, target.dtype) for n in (5, 200, 200))
    used = int32([200, 0], target.device)

    def attend():
        return neginf.flash_attn_func(
            q, k, v, causal=True, seqused_k=used, num_splits=splits, return_lse=True
        )

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for lengths in ([200, 0], [0, 130], [3, 200], [0, 0]):
        for tensor in (q, k, v):
            tensor.normal_()
        used.copy_(int32(lengths, "cpu"))
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        expected = attend()
        judge.assert_bits_equal(captured[0], expected[0], "out")
        judge.assert_bits_equal(captured[1], expected[1], "lse")


@runs_on("forward", "backward", dtypes=("bfloat16",), gpu_only=True)
def test_cuda_graph_of_backward(target):
    q, k, v, dout = (
        torch.randn(2, n, 2, 64).to(target.device, target.dtype) for n in (70, 200, 200, 70)
    )
    used = int32([200, 30], target.device)
    out, lse = neginf.flash_attn_func(q, k, v, causal=True, seqused_k=used, return_lse=True)

    def backward():
        options = (None, None, None, used, None, None, 0.125, True, -1, -1, 0.0, None, None, 1)
        return torch.ops.neginf.backward(dout, None, q, k, v, out, lse, *options, True)[:3]

    backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward()
    for _ in range(3):
        dout.normal_()
        for gradient in captured:
            gradient.fill_(float("nan"))
        graph.replay()
        for name, got, expected in zip("qkv", captured, backward(), strict=True):
            judge.assert_bits_equal(got, expected, f"d{name}")


@runs_on("combine", dtypes=("bfloat16",), gpu_only=True)
def test_cuda_graph_of_merge(target):
    outs = torch.zeros(3, 2, 9, 4, 64).to(target.device, target.dtype)
    lses = torch.zeros(3, 2, 4, 9, device=target.device)
    neginf.flash_attn_combine(outs, lses)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = neginf.flash_attn_combine(outs, lses)
    outs.normal_()
    lses.normal_()
    lses[:, 0] = float("-inf")
    graph.replay()
    expected = neginf.flash_attn_combine(outs, lses)
    judge.assert_bits_equal(captured[0], expected[0], "out")
    judge.assert_bits_equal(captured[1], expected[1], "lse")
