"""vLLM's function that merges attention states."""

import torch

from neginf.convert import from_fa3
from neginf.merge import flash_attn_combine


def merge_attn_states(
    output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None
):
    """Merges the state of a prefix with that of a suffix, into `output` and `output_lse`.

    The states are read as FlashAttention-2 and -3 write them, see :func:`neginf.convert.from_fa3`:
    -inf is an empty row, whatever the output beside it holds; +inf is one if the output beside it
    is 0, and NaN otherwise. Two empty rows give 0 and -inf.

    Args:
        output: (tokens, heads, head_dim), overwritten; last stride 1. May be one of the inputs.
        prefix_output, suffix_output: (tokens, heads, head_dim), any strides.
        prefix_lse, suffix_lse: (heads, tokens) float32 (float64 with float64), natural logarithm,
            any strides.
        output_lse: (heads, tokens), overwritten; None if it is not wanted.

    Raises:
        ValueError: shapes or devices that do not fit; tensors that need a gradient while gradients
            are recorded, as in :func:`neginf.flash_attn_combine` with an ``out``.
        TypeError: a dtype that does not fit.
    """
    if output.dim() != 3:
        raise ValueError(
            f"output: got {output.dim()} dimensions; accepted is (tokens, heads, head_dim)"
        )
    lse_shape = (output.shape[1], output.shape[0])
    for name, out, lse in (
        ("prefix", prefix_output, prefix_lse),
        ("suffix", suffix_output, suffix_lse),
    ):
        _check_shape(f"{name}_output", out, output.shape)
        _check_shape(f"{name}_lse", lse, lse_shape)
    if output_lse is not None:
        _check_shape("output_lse", output_lse, lse_shape)
    prefix, suffix = from_fa3(prefix_output, prefix_lse), from_fa3(suffix_output, suffix_lse)
    outs, lses = (torch.stack(pair) for pair in zip(prefix, suffix, strict=True))
    _, lse = flash_attn_combine(outs, lses, out=output)
    if output_lse is not None:
        output_lse.copy_(lse)


def _check_shape(name, tensor, shape):
    if tensor.shape != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; accepted is {tuple(shape)}")
