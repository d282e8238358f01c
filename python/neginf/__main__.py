"""`python -m neginf info`: versions, GPUs, back-ends, and the command that adds what is missing."""

import argparse
import platform
from pathlib import Path

import torch

import neginf
from neginf.backends import backends, install_command, visible_gpus
from neginf.ops import build_info


def info() -> str:
    built = build_info()
    gpus = [
        f"{name}, compute capability {major}.{minor}" for name, (major, minor) in visible_gpus()
    ]
    lines = [
        f"neginf     {neginf.__version__} in {Path(neginf.__file__).parent}",
        f"python     {platform.python_version()}",
        f"torch      {torch.__version__}{_mismatch(built['torch'])}",
        f"CUDA       {torch.version.cuda or 'none'} in torch, {built['cuda'] or 'none'} in neginf",
        f"CUTLASS    {built['cutlass'] or 'none'}",
        *(f"GPU {i}      {gpu}" for i, gpu in enumerate(gpus)),
        *([] if gpus else ["GPU        none visible"]),
        "",
        str(backends()),
        "",
        _advice(len(gpus)),
    ]
    return "\n".join(lines)


def _mismatch(built_with: str) -> str:
    if built_with == torch.__version__:
        return ""
    return f", but neginf was built with torch {built_with}: reinstall neginf"


def _advice(gpus: int) -> str:
    missing = [b.name for b in backends().values() if not b.built]
    if not missing:
        return "Every back-end is in this build."
    machines = "the GPU of this machine" if gpus else "machines with a GPU"
    command = install_command(*backends())
    return f"To add {', '.join(missing)} for {machines} (needs the CUDA toolkit):\n  {command}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m neginf", description=__doc__)
    parser.add_argument(
        "command", nargs="?", default="info", choices=["info"], help="what to print"
    )
    parser.parse_args()
    print(info())


if __name__ == "__main__":
    main()
