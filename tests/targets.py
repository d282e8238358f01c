"""The back-ends of this build, as pytest parameters."""

from typing import NamedTuple

import pytest
import torch

import neginf
from neginf import _C

NO_GPU = "this machine has no GPU"
FEW_GPUS = "this machine has fewer than two GPUs"
TARGETS_KEY = "targets"
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
HALF = ("bfloat16", "float16")


class Target(NamedTuple):
    device: str
    arch: str
    dtype: torch.dtype
    max_head_dim: int

    @property
    def forced_backend(self):
        # Plain-CUDA helper kernels are no back-end of their own.
        return None if self.arch == "cuda" else self.arch

    def head_dims(self, *candidates):
        return tuple(d for d in candidates if d <= self.max_head_dim)


def max_head_dim(operation, arch, dtype):
    """The largest head_dim this build serves, 0 when it has no such kernel."""
    sizes = [d for o, a, t, d in _C.kernels() if (o, a, t) == (operation, arch, dtype)]
    return max(sizes, default=0)


def served(operations, arch, dtype):
    """The largest head_dim for all `operations`; helpers in plain CUDA go with every GPU arch."""
    sizes = []
    for operation in operations:
        size = max_head_dim(operation, arch, dtype)
        if size == 0 and arch != "cpu":
            size = max_head_dim(operation, "cuda", dtype)
        sizes.append(size)
    return min([*sizes, 256])


def gpu_archs(operations):
    if all(operation.startswith("combine") for operation in operations):
        return ["cuda"]
    return [b.name for b in neginf.backends().values() if b.usable and b.name != "cpu"]


def targets(*operations, dtypes=tuple(DTYPES), gpu_only=False):
    """Parameters for every back-end and dtype of this build that serves all `operations`."""
    devices = [] if gpu_only else [("cpu", "cpu")]
    if torch.cuda.is_available():
        devices += [("cuda", arch) for arch in gpu_archs(operations)]
    params = []
    for device, arch in devices:
        for name in dtypes:
            size = served(operations, arch, name)
            if size:
                target = Target(device, arch, DTYPES[name], size)
                params.append(pytest.param(target, id=f"{arch}-{name}"))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason=NO_GPU)
        params.append(pytest.param(None, id="gpu", marks=skip))
    return params


def runs_on(*operations, dtypes=tuple(DTYPES), gpu_only=False):
    """Decorator: the test takes `target` and runs once for each back-end and dtype."""
    return pytest.mark.targets(*operations, dtypes=dtypes, gpu_only=gpu_only)
