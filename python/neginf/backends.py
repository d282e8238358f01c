"""Which back-ends this build holds, which of them run here, and how to get the others."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from neginf import _C

# The compute capabilities on which each GPU back-end runs: sm80 is carried as PTX too, sm90 is not.
GPU_BACKENDS = {"sm80": "8.0 or later", "sm90": "9.0"}
BACKENDS = ("cpu", *GPU_BACKENDS)

# Kernels in plain CUDA, part of every GPU back-end.
_PLAIN_CUDA = "cuda"


@dataclass(frozen=True)
class Backend:
    """One back-end: is it in this build, does it run here, and what it can do."""

    name: str
    built: bool
    usable: bool
    # operation -> the head_dims it is compiled for; each also serves smaller ones
    operations: dict[str, tuple[int, ...]] = field(default_factory=dict)
    why: str = ""  # it is not usable, and what to do about it

    def __str__(self) -> str:
        state = "ready" if self.usable else self.why
        return f"{self.name:<6} {state}" + "".join(
            f"\n         {operation:<17} head_dim {', '.join(map(_show_head_dim, head_dims))}"
            for operation, head_dims in self.operations.items()
        )


class Backends(dict[str, Backend]):
    """Name -> Backend; prints as a table."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.values()))

    __repr__ = __str__


def backends() -> Backends:
    """What this build holds, back-end by back-end, and why one cannot be used."""
    return Backends({name: _describe(name) for name in BACKENDS})


@contextlib.contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Forces one back-end for the whole process while the block runs; None is the automatic choice.

    The environment variable NEGINF_BACKEND does the same from the start.
    """
    before = _C.get_backend()
    _force(name, "backend")
    try:
        yield
    finally:
        _C.set_backend(before)


def install_command(*names: str) -> str:
    """The command that reinstalls this package with `names` in it, in the running environment."""
    source = _source_folder()
    what = f"-e {shlex.quote(str(source))}" if source else ".  # in a checkout of neginf"
    python = shlex.quote(sys.executable)
    return f"NEGINF_BACKENDS={','.join(names)} {python} -m pip install -v {what}"


def visible_gpus() -> list[tuple[str, tuple[int, int]]]:
    """Name and compute capability of each GPU that torch sees."""
    return [
        (torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
        for i in range(torch.cuda.device_count())
    ]


def _describe(name: str) -> Backend:
    operations = _operations(name)
    if name not in _built():
        command = install_command(*_built(), name)
        return Backend(name, False, False, why=f"not in this build; to add it: {command}")
    if name == "cpu" or any(_runs_on(capability, name) for _, capability in visible_gpus()):
        return Backend(name, True, True, operations)
    why = f"built, but no GPU of compute capability {GPU_BACKENDS[name]} is visible"
    return Backend(name, True, False, operations, why)


def _runs_on(capability: tuple[int, int], name: str) -> bool:
    return capability == (9, 0) if name == "sm90" else capability >= (8, 0)


def _built() -> list[str]:
    archs = {arch for _, arch, _, _ in _C.kernels()}
    return [name for name in BACKENDS if name in archs]


def _operations(name: str) -> dict[str, tuple[int, ...]]:
    archs = {name} if name == "cpu" else {name, _PLAIN_CUDA}
    found: dict[str, set[int]] = {}
    for operation, arch, _, head_dim in _C.kernels():
        if arch in archs:
            found.setdefault(operation, set()).add(head_dim)
    return {operation: tuple(sorted(found[operation])) for operation in sorted(found)}


def _show_head_dim(head_dim: int) -> str:
    return "any" if head_dim == _C.ANY_HEAD_DIM else f"<= {head_dim}"


def _source_folder() -> Path | None:
    """The checkout that this package is imported from, if it is one."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "setup.py").exists() else None


def _force(name: str | None, asked_by: str) -> None:
    if name is not None and name not in BACKENDS:
        raise ValueError(f"{asked_by}: got {name!r}; accepted are {', '.join(BACKENDS)}")
    if name is not None and name not in _built():
        raise NotImplementedError(
            f"{asked_by}: got {name!r}, which is not in this build. To add it, set NEGINF_BACKENDS "
            f"and reinstall: {install_command(*_built(), name)}"
        )
    _C.set_backend(name)


if _from_environment := os.environ.get("NEGINF_BACKEND"):
    _force(_from_environment, "NEGINF_BACKEND")
