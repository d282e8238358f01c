"""Checks of arguments that more than one module makes. Messages name the argument."""

import operator

import torch

STATE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_tensors(**tensors):
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}; accepted is a tensor")


def check_same_head_dim(name, tensor, first_name, first):
    """For values that are attended to in separate calls."""
    if tensor.dim() and first.dim() and tensor.shape[-1] != first.shape[-1]:
        raise ValueError(
            f"{name}: got head_dim {tensor.shape[-1]}; accepted is that of {first_name}, "
            f"{first.shape[-1]}"
        )


def check_ints(name, got, values, accepted):
    """As ints: what Python takes for an index is one, numpy's ints too."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise TypeError(f"{name}: got {got!r}; accepted is {accepted}") from None


def check_same_kind(name, tensor, first_name, first):
    """Of one shape, device and dtype."""
    check_tensors(**{name: tensor, first_name: first})
    for what, error in (("shape", ValueError), ("device", ValueError), ("dtype", TypeError)):
        got, accepted = getattr(tensor, what), getattr(first, what)
        if got != accepted:
            raise error(f"{name}: got {what} {got}; accepted is that of {first_name}, {accepted}")


def check_lse(name, lse, shape, out_name, out):
    """Of this shape, and of the device and the dtype that belong to out."""
    check_tensors(**{name: lse, out_name: out})
    if lse.shape != shape:
        raise ValueError(
            f"{name}: got shape {tuple(lse.shape)}; accepted is {tuple(shape)} for {out_name} of "
            f"shape {tuple(out.shape)}"
        )
    if lse.device != out.device:
        raise ValueError(
            f"{name}: got device {lse.device}; accepted is that of {out_name}, {out.device}"
        )
    accepted = torch.promote_types(out.dtype, torch.float32)
    if lse.dtype != accepted:
        raise TypeError(f"{name}: got dtype {lse.dtype}; accepted is {accepted}")


def check_state(out, lse, heads_last=False):
    check_tensors(out=out, lse=lse)
    if out.dim() not in (3, 4):
        raise ValueError(
            f"out: got {out.dim()} dimensions; accepted are 4, (batch, seqlen, heads, head_dim), "
            "or 3, (total, heads, head_dim)"
        )
    if out.dtype not in STATE_DTYPES:
        raise TypeError(
            f"out: got dtype {out.dtype}; accepted are float32, float16 and bfloat16, and on the "
            "CPU float64"
        )
    *batch, rows, heads, _ = out.shape
    shape = (*batch, rows, heads) if heads_last else (*batch, heads, rows)
    check_lse("lse", lse, shape, "out", out)


def check_no_gradient(**tensors):
    """For what is overwritten, and what it is overwritten with."""
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(
                f"{name}: got a tensor that needs a gradient; accepted are tensors without, or a "
                "call under torch.no_grad()"
            )
