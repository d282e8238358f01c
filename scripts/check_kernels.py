"""Compiles every CUDA kernel and prints what ptxas says of it. Needs nvcc, but no GPU.

    python scripts/check_kernels.py

Fails when a kernel spills registers, or when a file that should hold kernels compiled to none.
What is already compiled is not compiled again.
"""

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import build_tools as tools


@dataclass
class Resources:
    file: str
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int
    kernel: str


ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def resources(source: Path) -> list[Resources]:
    found = []
    for match in ENTRY.finditer(tools.resource_log(source).read_text()):
        smem = re.search(r"(\d+) bytes smem", match["rest"])
        found.append(
            Resources(
                str(source.relative_to(tools.CSRC)),
                match["arch"],
                int(match["registers"]),
                int(match["stack"]),
                int(match["stores"]),
                int(match["loads"]),
                int(smem[1]) if smem else 0,
                match["kernel"],
            )
        )
    return found


def readable(mangled: list[str]) -> list[str]:
    names = subprocess.run(
        ["c++filt"], input="\n".join(mangled), text=True, capture_output=True, check=True
    ).stdout.splitlines()
    # Without the namespaces, the return type and the arguments.
    return [re.sub(r"^void |\w+::|\(anonymous namespace\)::|\([^()]*\)$", "", n) for n in names]


def is_missing(source: Path, found: list[Resources], gencode: list[str]) -> bool:
    if "__global__" not in source.read_text() and tools.head_dim(source) is None:
        return False  # host code only, such as a launcher
    wanted = set(re.findall(r"sm_\w+", " ".join(gencode)))
    return not wanted <= {r.arch for r in found}


def main() -> int:
    plan = tools.Plan(tuple(tools.available_backends()))
    if tools.CudaToolkit.find() is None:
        raise tools.BuildError("no nvcc was found, so no kernel could be checked.")
    start = time.monotonic()
    tools.compile_kernels(plan)
    print(f"compiled in {time.monotonic() - start:.0f} s\n")

    rows = {source: resources(source) for source in plan.kernels()}
    everything = [r for found in rows.values() for r in found]
    names = readable([r.kernel for r in everything])
    print("registers  stack  spills  static smem  arch   file                        kernel")
    for r, name in zip(everything, names, strict=True):
        spills = r.spill_stores + r.spill_loads
        print(
            f"{r.registers:9}  {r.stack:5}  {spills:6}  {r.static_smem:11}  {r.arch:5}  "
            f"{r.file:26}  {name[:120]}"
        )

    problems = [f"{r.file}: a kernel spills" for r in everything if r.spill_stores + r.spill_loads]
    problems += [
        f"{source.relative_to(tools.CSRC)}: no kernel was compiled for one of {' '.join(gencode)}"
        for source, gencode in plan.kernels().items()
        if is_missing(source, rows[source], gencode)
    ]
    print(f"\n{len(everything)} kernels in {len(rows)} files, {len(problems)} problems")
    for problem in sorted(set(problems)):
        print(f"  {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
