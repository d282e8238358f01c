"""The command line of neginf.

python -m neginf info     versions, GPUs, back-ends, and the command that adds what is missing
python -m neginf audit    what each attention library here returns for rows without keys
"""

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


def audit(arguments) -> None:
    from neginf.audit import audit, report

    try:
        found = audit(arguments.adapter, arguments.only, arguments.timeout)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    report.show(found)
    if arguments.json:
        arguments.json.write_text(found.to_json())
    if arguments.markdown:
        arguments.markdown.write_text(report.markdown(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m neginf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("info", help="what this build holds")
    audit_parser = commands.add_parser("audit", help="what attention libraries return")
    audit_parser.add_argument("--json", type=Path, help="write everything to this file")
    audit_parser.add_argument("--markdown", type=Path, help="write the table to this file")
    audit_parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        help="a file or module with a neginf.audit.Adapter for one more library; can be repeated",
    )
    audit_parser.add_argument(
        "--only", action="append", help="probe the library of this name; can be repeated"
    )
    audit_parser.add_argument(
        "--timeout", type=int, default=300, help="seconds that a library may take (300)"
    )
    arguments = parser.parse_args()
    if arguments.command == "audit":
        audit(arguments)
    else:
        print(info())


if __name__ == "__main__":
    main()
