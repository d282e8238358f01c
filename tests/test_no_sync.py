"""No operator waits for the GPU: torch raises where one does."""

import contextlib

import pytest
import torch

import neginf
from problems import Inputs, Problem
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
def test_the_mode_sees_a_sync(target):
    with no_sync(), pytest.raises(RuntimeError):
        torch.ones(1, device=target.device).item()
