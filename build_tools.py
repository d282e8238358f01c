"""What a build of neginf consists of; setup.py and scripts/check_kernels.py share it.

Kernels (csrc/common, csrc/sm*) know no torch, so they are compiled apart from the extension: one
ninja file for all of them, with the flags of their architecture, without torch on the include
path, and with what ptxas says of registers and spills kept beside each object. The objects are
the same for every Python and every torch; the extension only links them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
BUILD = ROOT / "build"

CUTLASS_WHEEL = "nvidia-cutlass==4.2.0.0"

# sm80 is carried as PTX too, so that it runs on every later GPU; sm90a code runs on sm90 alone.
GENCODE = {
    # Also as sm_90 code: a driver that compiles the PTX itself may find other registers to spill,
    # and from compute_90 the backward adds dQ by vectors.
    "sm80": [
        "-gencode=arch=compute_80,code=[sm_80,compute_80]",
        "-gencode=arch=compute_90,code=sm_90",
    ],
    "sm90": ["-gencode=arch=compute_90a,code=sm_90a"],
}

NVCC_FLAGS = [
    "-O3",
    "-std=c++20",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",  # m64nNk16 for every N
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra",
    "--resource-usage",
    f"-I{CSRC}",
]


class BuildError(SystemExit):
    """A build that cannot do what was asked: pip shows the message, without a traceback."""

    def __init__(self, message: str):
        super().__init__(f"\nneginf: {message}\n")


def available_backends() -> list[str]:
    """The back-ends that this source tree has files for."""
    return ["cpu", *(arch for arch in GENCODE if any((CSRC / arch).glob("*.cu")))]


def head_dim(source: Path) -> int | None:
    """64 for forward_d64.cu; None for a kernel that serves any head_dim."""
    match = re.search(r"_d(\d+)$", source.stem)
    return int(match[1]) if match else None


def _list_from_env(variable: str) -> list[str]:
    return [item.strip() for item in os.environ.get(variable, "").split(",") if item.strip()]


@dataclass(frozen=True)
class CudaToolkit:
    home: Path

    @classmethod
    def find(cls) -> CudaToolkit | None:
        # An nvcc on PATH comes last: it may be a wrapper with no toolkit around it.
        named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        on_path = shutil.which("nvcc")
        homes = [named] if named else ["/usr/local/cuda", on_path and Path(on_path).parent.parent]
        for home in map(Path, filter(None, homes)):
            if (home / "bin/nvcc").exists():
                return cls(home)
        return None

    @property
    def nvcc(self) -> Path:
        return self.home / "bin/nvcc"

    @cached_property
    def version(self) -> str:
        text = subprocess.check_output([self.nvcc, "--version"], text=True)
        return re.search(r"release (\d+\.\d+)", text)[1]

    @property
    def library_dir(self) -> Path:
        return next(d for d in (self.home / "lib64", self.home / "lib") if d.exists())


@dataclass(frozen=True)
class Cutlass:
    include: Path

    @classmethod
    def find(cls) -> Cutlass | None:
        if named := os.environ.get("CUTLASS_PATH"):
            found = cls(Path(named).resolve() / "include")
            if not found.exists():
                raise BuildError(f"CUTLASS_PATH={named} has no include/cutlass/version.h.")
            return found
        copy = cls(BUILD / CUTLASS_WHEEL / "include")
        for found in (cls(ROOT / "third_party/cutlass/include"), copy):
            if found.exists():
                return found
        if spec := importlib.util.find_spec("cutlass_library"):
            # An isolated build installs the wheel in a new temporary folder each time; compiling
            # against that would make every build a full one.
            wheel = Path(spec.submodule_search_locations[0]) / "source/include"
            shutil.copytree(wheel, copy.include, dirs_exist_ok=True)
            return copy
        return None

    def exists(self) -> bool:
        return self._version_header.exists()

    @property
    def _version_header(self) -> Path:
        return self.include / "cutlass/version.h"

    @property
    def version(self) -> str:
        text = self._version_header.read_text()
        return ".".join(
            re.search(rf"#define CUTLASS_{part} (\d+)", text)[1]
            for part in ("MAJOR", "MINOR", "PATCH")
        )


@dataclass(frozen=True)
class Plan:
    """What to build. Made from NEGINF_BACKENDS, NEGINF_HEAD_DIMS and the GPUs that torch sees."""

    backends: tuple[str, ...]
    head_dims: frozenset[int] | None = None  # None: all there are
    note: str = ""

    @classmethod
    def from_environment(cls, torch) -> Plan:
        available = available_backends()
        dims = _list_from_env("NEGINF_HEAD_DIMS")
        if wrong := [dim for dim in dims if not dim.isdigit()]:
            raise BuildError(f"NEGINF_HEAD_DIMS: got {wrong}; accepted are numbers.")
        head_dims = frozenset(map(int, dims)) or None
        asked = _list_from_env("NEGINF_BACKENDS")
        if not asked:
            backends, note = cls._default_backends(torch, available)
            return cls(backends, head_dims, note)

        for backend in asked:
            if backend not in available:
                raise BuildError(
                    f"NEGINF_BACKENDS={','.join(asked)}: there is no back-end {backend!r} to "
                    f"build. This version has {', '.join(available)}."
                )
        # cpu is always built: it is small, and the reference for all others.
        plan = cls(tuple(b for b in available if b == "cpu" or b in asked), head_dims)
        if why_not := plan.has_cuda and _why_no_cuda(torch):
            raise BuildError(f"NEGINF_BACKENDS={','.join(asked)} cannot be built: {why_not}")
        return plan

    @classmethod
    def _default_backends(cls, torch, available) -> tuple[tuple[str, ...], str]:
        wanted = set().union(*(_best_for(i, torch) for i in range(torch.cuda.device_count())))
        if not wanted:
            gpus = [b for b in available if b != "cpu"]
            ask = f" To build GPU kernels anyway, set NEGINF_BACKENDS={','.join(gpus)}."
            return ("cpu",), "No GPU with kernels is visible." + (ask if gpus else "")
        if why_not := _why_no_cuda(torch):
            return ("cpu",), f"A GPU is visible, but its kernels cannot be built: {why_not}"
        return tuple(b for b in available if b == "cpu" or b in wanted), ""

    @property
    def architectures(self) -> list[str]:
        return [b for b in self.backends if b != "cpu"]

    @property
    def has_cuda(self) -> bool:
        return bool(self.architectures)

    def kernels(self) -> dict[Path, list[str]]:
        """Every kernel file of this build -> its -gencode flags."""
        if not self.has_cuda:
            return {}
        union = [flag for arch in self.architectures for flag in GENCODE[arch]]
        kernels = dict.fromkeys(sorted((CSRC / "common").glob("*.cu")), union)
        known_dims = set()
        for arch in self.architectures:
            for source in sorted((CSRC / arch).glob("*.cu")):
                dim = head_dim(source)
                known_dims.add(dim)
                if self.head_dims is None or dim is None or dim in self.head_dims:
                    kernels[source] = GENCODE[arch]
        if unknown := (self.head_dims or set()) - known_dims:
            raise BuildError(
                f"NEGINF_HEAD_DIMS: no kernel file for {sorted(unknown)}; "
                f"there are {sorted(known_dims - {None})}."
            )
        return kernels


def _best_for(device: int, torch) -> set[str]:
    major, minor = torch.cuda.get_device_capability(device)
    wanted = {"sm80"} if major >= 8 else set()
    if (major, minor) == (9, 0):
        wanted.add("sm90")  # beside sm80, which may be asked for and has more head_dims
    return wanted & set(available_backends())


def _why_no_cuda(torch) -> str | None:
    """What keeps CUDA kernels from being built here, with what to do about it."""
    toolkit = CudaToolkit.find()
    if toolkit is None:
        return (
            "no nvcc was found. Install the CUDA toolkit, and set CUDA_HOME if it is not in "
            "/usr/local/cuda."
        )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA."
    if toolkit.version.split(".")[0] != torch.version.cuda.split(".")[0]:
        return (
            f"{toolkit.nvcc} is CUDA {toolkit.version}, torch was built with CUDA "
            f"{torch.version.cuda}; the major versions must agree. CUDA_HOME chooses the toolkit."
        )
    return None


def require_cutlass() -> Cutlass:
    cutlass = Cutlass.find()
    if cutlass is None:
        raise BuildError(
            "CUTLASS was not found. Any one of these will do: set CUTLASS_PATH to a checkout; put "
            f"a checkout in third_party/cutlass; pip install '{CUTLASS_WHEEL}'."
        )
    return cutlass


def limit_jobs() -> int:
    """MAX_JOBS, by default one per core but none without 3 GiB: what a CuTe kernel may take."""
    if not os.environ.get("MAX_JOBS", "").isdigit():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        jobs = min(len(os.sched_getaffinity(0)), memory // (3 << 30))
        os.environ["MAX_JOBS"] = str(max(1, jobs))
    return int(os.environ["MAX_JOBS"])


def object_file(source: Path) -> Path:
    return BUILD / "cuda" / source.relative_to(CSRC).with_suffix(".o")


def resource_log(source: Path) -> Path:
    return object_file(source).with_suffix(".log")


def compile_kernels(plan: Plan) -> list[str]:
    """Compiles what is out of date and returns the object files of the whole plan."""
    kernels = plan.kernels()
    if not kernels:
        return []
    toolkit, cutlass = CudaToolkit.find(), require_cutlass()
    flags = [*NVCC_FLAGS, "-isystem", str(cutlass.include)]
    lines = [
        f"nvcc = {toolkit.nvcc} {shlex.join(flags)}",
        "rule nvcc",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = nvcc $source",
        # ptxas reports go to the log only, warnings and errors to the terminal as well.
        "  command = $nvcc $gencode -MD -MF $out.d -c $in -o $out > $log 2>&1; status=$$?; "
        "grep -vE '^ptxas info|bytes stack frame' $log; exit $$status",
    ]
    for source, gencode in kernels.items():
        lines += [
            f"build {_escape(object_file(source))}: nvcc {_escape(source)}",
            f"  gencode = {shlex.join(gencode)}",
            f"  log = {shlex.quote(str(resource_log(source)))}",
            f"  source = {source.relative_to(CSRC)}",
        ]
    folder = BUILD / "cuda"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    result = subprocess.run(["ninja", "-C", str(folder), "-j", str(limit_jobs())], check=False)
    if result.returncode:
        raise BuildError("a CUDA kernel did not compile; the compiler's message is above.")
    return [str(object_file(source)) for source in kernels]


def _escape(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))
