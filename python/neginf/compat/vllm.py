"""vLLM's function that merges attention states."""

import torch

from neginf._checks import check_lse, check_no_gradient, check_same_kind, check_tensors
from neginf.convert import from_fa2
from neginf.merge import NEG_INF, flash_attn_combine


def merge_attn_states(
    output,
    prefix_output,
    prefix_lse,
    suffix_output,
    suffix_lse,
    output_lse=None,
    prefill_tokens_with_context=None,
    output_scale=None,
):
    """Merges the state of a prefix with that of a suffix, into `output` and `output_lse`.

    The states are read as :func:`neginf.convert.from_fa2` reads them:
    -inf is an empty row, whatever the output beside it holds; +inf is one if the output beside it
    is 0, and NaN otherwise. Two empty rows give 0 and -inf.

    Args:
        output: (tokens, heads, head_dim), overwritten; last stride 1. May be one of the inputs.
        prefix_output, suffix_output: (tokens, heads, head_dim), one dtype, any strides.
        prefix_lse, suffix_lse: (heads, tokens) float32 (float64 with float64), natural logarithm,
            any strides.
        output_lse: (heads, tokens), overwritten; typed as prefix_lse. None if it is not wanted.
        prefill_tokens_with_context: tokens from this one on have no prefix, whatever prefix_output
            and prefix_lse hold for them. None: all have one.
        output_scale: None; quantised outputs are not implemented.

    Raises:
        ValueError: shapes or devices that do not fit; tensors that need a gradient while gradients
            are recorded, since what is overwritten has none.
        TypeError: something that is no tensor, or a dtype that does not fit.
        NotImplementedError: an output_scale.
    """
    if output_scale is not None:
        raise NotImplementedError("output_scale: got a tensor; accepted is None")
    check_tensors(output=output, prefix_output=prefix_output)
    if output.dim() != 3:
        raise ValueError(
            f"output: got {output.dim()} dimensions; accepted is (tokens, heads, head_dim)"
        )
    if prefix_output.shape != output.shape or prefix_output.device != output.device:
        raise ValueError(
            f"prefix_output: got shape {tuple(prefix_output.shape)} on {prefix_output.device}; "
            f"accepted is that of output, {tuple(output.shape)} on {output.device}"
        )
    tokens, heads, _ = output.shape
    check_lse("prefix_lse", prefix_lse, (heads, tokens), "prefix_output", prefix_output)
    check_same_kind("suffix_output", suffix_output, "prefix_output", prefix_output)
    check_same_kind("suffix_lse", suffix_lse, "prefix_lse", prefix_lse)
    check_no_gradient(
        output=output, prefix_output=prefix_output, prefix_lse=prefix_lse,
        suffix_output=suffix_output, suffix_lse=suffix_lse,
    )  # fmt: skip
    if output_lse is not None:
        check_same_kind("output_lse", output_lse, "prefix_lse", prefix_lse)
        check_no_gradient(output_lse=output_lse)
    if prefill_tokens_with_context is not None:
        token = torch.arange(tokens, device=output.device)
        prefix_lse = torch.where(token < prefill_tokens_with_context, prefix_lse, NEG_INF)
    prefix, suffix = from_fa2(prefix_output, prefix_lse), from_fa2(suffix_output, suffix_lse)
    outs, lses = (torch.stack(pair) for pair in zip(prefix, suffix, strict=True))
    _, lse = flash_attn_combine(outs, lses, out=output)
    if output_lse is not None:
        output_lse.copy_(lse)
