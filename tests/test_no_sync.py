"""No operator waits for the GPU: torch raises where one does."""

import contextlib

import pytest
import torch

import neginf
from neginf import convert
from neginf.compat import flashinfer, vllm
from problems import Inputs, Problem, int32
from targets import runs_on


@contextlib.contextmanager
def no_sync():
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


PROBLEMS = {
    "dense": Problem(lengths_q=(70,) * 2, lengths_k=(90,) * 2, head_dim=64, causal=True),
    "all_options": Problem(
        lengths_q=(70,) * 2, lengths_k=(90,) * 2, head_dim=64, softcap=2.0, alibi="bh",
        sink=(0.5, -1.0), used_q=(70, 3), used_k=(0, 90), window_size=(30, 1),
    ),
    "no_keys": Problem(lengths_q=(70,), lengths_k=(0,), head_dim=64),
    "varlen": Problem(
        lengths_q=(40, 0, 5), lengths_k=(3, 2, 0), varlen=True, extra_q=2, head_dim=64
    ),
    "head_dim_59": Problem(lengths_q=(70,), lengths_k=(90,), head_dim=59),
}  # fmt: skip


def on_device(name, target):
    """Inputs whose options are on the device already: copying them there would be a sync."""
    inputs = Inputs(PROBLEMS[name], target.dtype, target.device)
    inputs.options = {
        n: o.to(target.device) if isinstance(o, torch.Tensor) else o
        for n, o in inputs.options.items()
    }
    return inputs


@runs_on("forward", "combine", dtypes=("bfloat16",), gpu_only=True)
@pytest.mark.parametrize("splits", [1, 3, 0])
@pytest.mark.parametrize("name", PROBLEMS)
def test_forward(target, name, splits):
    inputs = on_device(name, target)
    with no_sync():
        inputs.call(*(inputs.tensor(n) for n in "qkv"), num_splits=splits)


@runs_on("forward", "backward", dtypes=("bfloat16",), gpu_only=True)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
def test_backward(target, name, deterministic):
    inputs = on_device(name, target)
    leaves = [inputs.tensor(n).detach().requires_grad_() for n in "qkv"]
    grads = inputs.tensor("dout"), inputs.dlse.to(target.device)
    with no_sync():
        outputs = inputs.call(*leaves, deterministic=deterministic)
        torch.autograd.grad(outputs, leaves, grads)


@runs_on("combine", dtypes=("bfloat16",), gpu_only=True)
def test_combine(target):
    outs = torch.randn(3, 2, 9, 4, 64, device=target.device, dtype=target.dtype)
    lses = torch.randn(3, 2, 4, 9, device=target.device)
    with no_sync():
        neginf.flash_attn_combine(outs, lses)
        neginf.flash_attn_combine(outs, lses, out=torch.empty_like(outs[0]))
        neginf.merge_states(list(outs), list(lses))


@runs_on("combine", "combine_backward", dtypes=("bfloat16",), gpu_only=True)
def test_combine_backward(target):
    outs = torch.randn(3, 2, 9, 4, 64, device=target.device, dtype=target.dtype).requires_grad_()
    lses = torch.randn(3, 2, 4, 9, device=target.device).requires_grad_()
    with no_sync():
        out, lse = neginf.flash_attn_combine(outs, lses)
        torch.autograd.grad([out, lse], [outs, lses], [torch.ones_like(out), torch.ones_like(lse)])


@runs_on("combine", dtypes=("bfloat16",), gpu_only=True)
def test_merge_of_two(target):
    out = torch.randn(2, 9, 4, 64, device=target.device, dtype=target.dtype)
    lse = torch.randn(2, 4, 9, device=target.device)
    mask = torch.ones(9, dtype=torch.bool, device=target.device)
    with no_sync():
        neginf.merge_state(out[0], lse[0], out[1], lse[1])
        neginf.merge_state_in_place(out[0], lse[0], out[1], lse[1], mask)
        neginf.apply_sink(out[0], lse[0], lse[0, :, 0])
        v, s = out.transpose(0, 1), lse.permute(2, 0, 1)
        flashinfer.merge_states(v, s)
        flashinfer.merge_state_in_place(v[:, 0], s[:, 0], v[:, 1], s[:, 1], mask)
        vllm.merge_attn_states(torch.empty_like(out[0]), out[0], lse[0], out[1], lse[1])


@runs_on("combine", dtypes=("bfloat16",), gpu_only=True)
def test_converters(target):
    out = torch.randn(5, 2, 64, device=target.device, dtype=target.dtype)
    lse = torch.randn(2, 5, device=target.device)
    cu_seqlens = int32([0, 2, 5], target.device)
    with no_sync():
        convert.from_fa2(*convert.to_fa2(out, lse))
        convert.from_fa3(*convert.to_fa3(out, lse))
        convert.from_flashmla(*convert.to_flashmla(out, lse), attn_sink=lse[:, 0])
        convert.from_flashinfer(*convert.to_flashinfer(out, lse))
        convert.from_sentinel(*convert.to_sentinel(out, lse, -1e30), -1e30)
        padded = convert.to_fa2(out, lse, cu_seqlens_q=cu_seqlens, max_seqlen_q=3)
        convert.from_fa2(*padded, cu_seqlens_q=cu_seqlens)


@runs_on("forward", "combine", dtypes=("bfloat16",), gpu_only=True)
def test_pieces(target):
    q = torch.randn(2, 3, 2, 64, device=target.device, dtype=target.dtype)
    one, two = int32([0, 6], target.device), int32([0, 3, 6], target.device)
    rows = q.flatten(0, 1)
    levels = [(rows, rows, one, one, 6, 6), (rows, rows, two, two, 3, 3)]
    with no_sync():
        neginf.cascade_attention(rows, levels, causal=True)
        neginf.shared_prefix_attention(q, q[0], q[0], q, q, causal=True)
        neginf.chunked_attention(q, [(q, q), (q, q)], 6, causal=True)


@runs_on("combine", dtypes=("bfloat16",), gpu_only=True)
def test_the_mode_sees_a_sync(target):
    with no_sync(), pytest.raises(RuntimeError):
        torch.ones(1, device=target.device).item()
