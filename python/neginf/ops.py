"""The operators, as torch sees them.

Loading the extension registers ``torch.ops.neginf.*`` in C++: schema, CPU and CUDA
implementations, shapes for fake tensors (the Meta key) and autograd. Nothing is registered from
Python, so nothing here costs time per call.
"""

import torch

from neginf._C import build_info

append = torch.ops.neginf.append.default
check_decode = torch.ops.neginf.check_decode.default
decode = torch.ops.neginf.decode.default
decode_out = torch.ops.neginf.decode_out.default
forward = torch.ops.neginf.forward.default
backward = torch.ops.neginf.backward.default
combine = torch.ops.neginf.combine.default
combine_out = torch.ops.neginf.combine_out.default
merge = torch.ops.neginf.merge.default

__all__ = [
    "append",
    "backward",
    "build_info",
    "check_decode",
    "combine",
    "combine_out",
    "decode",
    "decode_out",
    "forward",
    "merge",
]
