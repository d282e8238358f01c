"""FlashInfer's functions that merge attention states.

Their log-sum-exp `s` is in base 2 and laid out (tokens, heads). A state whose s is -inf is left
out, and two such states give v = 0, s = -inf. +inf raises on the CPU and gives NaN on a GPU: a
state from a library that writes it comes in through :mod:`neginf.convert`.
"""

import torch

import neginf
from neginf._checks import check_lse, check_no_gradient, check_same_kind, check_tensors
from neginf.convert import lse_from_base2, lse_to_base2


def merge_state(v_a, s_a, v_b, s_b):
    """Merges two states over disjoint keys.

    Args:
        v_a, v_b: (tokens, heads, head_dim), one dtype.
        s_a, s_b: (tokens, heads) float32 (float64 with float64), base 2.

    Returns:
        (v, s), shaped and typed as the states. Differentiable.

    Raises:
        ValueError, TypeError: shapes, devices or dtypes that do not fit.
    """
    _check("v_a", v_a, "s_a", s_a)
    check_same_kind("v_b", v_b, "v_a", v_a)
    check_same_kind("s_b", s_b, "s_a", s_a)
    v, lse = neginf.merge_state(v_a, _natural(s_a), v_b, _natural(s_b))
    return v, _base2(lse)


def merge_states(v, s):
    """Merges any number of states over disjoint keys.

    Args:
        v: (tokens, states, heads, head_dim).
        s: (tokens, states, heads) float32 (float64 with float64), base 2.

    Returns:
        (v, s) without states. Differentiable.

    Raises:
        ValueError, TypeError: as :func:`merge_state`.
    """
    _check("v", v, "s", s, lead="tokens, states")
    out, lse = neginf.flash_attn_combine(v.transpose(0, 1), _natural(s.transpose(0, 1)))
    return out, _base2(lse)


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    """Merges the state (v_other, s_other) into (v, s), which is overwritten.

    Args:
        v, v_other: (tokens, heads, head_dim), one dtype.
        s, s_other: (tokens, heads) float32 (float64 with float64), base 2.
        mask: (tokens) bool: tokens that are merged; the others keep every bit. None is all.

    Raises:
        ValueError, TypeError: as :func:`merge_state` and :func:`neginf.merge_state_in_place`.
    """
    _check("v", v, "s", s)
    check_same_kind("v_other", v_other, "v", v)
    check_same_kind("s_other", s_other, "s", s)
    check_no_gradient(v=v, s=s, v_other=v_other, s_other=s_other)
    lse = _natural(s)
    neginf.merge_state_in_place(v, lse, v_other, _natural(s_other), mask)
    merged = _base2(lse)
    s.copy_(merged if mask is None else torch.where(mask[:, None], merged, s))


def _natural(s):
    return lse_from_base2(s).transpose(-1, -2)


def _base2(lse):
    return lse_to_base2(lse).transpose(-1, -2).contiguous()


def _check(v_name, v, s_name, s, lead="tokens"):
    check_tensors(**{v_name: v})
    accepted = f"({lead}, heads, head_dim)"
    if v.dim() != len(accepted.split(",")):
        raise ValueError(f"{v_name}: got {v.dim()} dimensions; accepted is {accepted}")
    check_lse(s_name, s, v.shape[:-1], v_name, v)
