"""Builds neginf._C against the torch of the environment that neginf is installed in.

NEGINF_BACKENDS   what to build, such as cpu,sm80 (default: cpu and what the visible GPUs can use)
NEGINF_HEAD_DIMS  which kernels of it, such as 64,128 (default: all)
MAX_JOBS          compile jobs at a time (default: by cores and memory)
CUDA_HOME         the CUDA toolkit (default: /usr/local/cuda, then the nvcc on PATH)
CUTLASS_PATH      a CUTLASS checkout (default: third_party/cutlass, then the wheel nvidia-cutlass)
"""

import site
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build_tools as tools


def import_torch():
    """The torch of the environment, or None when this step can do without.

    pip's isolated build hides the packages of the environment, but the extension fits one torch
    only: the one it will be loaded with. The interpreter is that environment's, so it can be found.
    """
    purelib, platlib = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
    for path in (purelib, platlib, *site.getsitepackages()):
        if path not in sys.path:
            sys.path.append(path)
    try:
        import torch
    except ImportError:
        # For an sdist; before a wheel pip runs these too, then another step that ends below.
        if {"egg_info", "sdist"} & set(sys.argv):
            return None
        raise tools.BuildError(
            f"torch is not installed in {sys.prefix}, and neginf is built against it. Run\n"
            "    pip install 'torch>=2.11'\n"
            "first. If torch is in another environment, build without isolation there\n"
            "(pip install --no-build-isolation, python -m build --no-isolation)."
        ) from None
    return torch


def options(torch):
    """The arguments of setup() that depend on what is built."""
    from torch.utils import cpp_extension

    plan = tools.Plan.from_environment(torch)

    class BuildExtension(cpp_extension.BuildExtension):
        def finalize_options(self):
            super().finalize_options()
            # pip's default is a new folder each time, and nothing would be incremental.
            tag = f"{sys.implementation.cache_tag}-torch{torch.__version__}"
            self.build_temp = str(tools.BUILD / tag)

        def build_extension(self, ext):
            print(f"neginf: building {', '.join(plan.backends)}. {plan.note}", flush=True)
            tools.limit_jobs()
            ext.extra_objects = tools.compile_kernels(plan)
            ext.extra_compile_args["cxx"] += facts(self.distribution.get_version(), torch, plan)
            super().build_extension(ext)

    needs_cutlass_wheel = plan.has_cuda and tools.Cutlass.find() is None
    return {
        "ext_modules": [extension(torch, cpp_extension, plan)],
        "cmdclass": {"build_ext": BuildExtension},
        "setup_requires": [tools.CUTLASS_WHEEL] if needs_cutlass_wheel else [],
    }


def extension(torch, cpp_extension, plan):
    folders = [tools.CSRC, tools.CSRC / "cpu", tools.CSRC / "torch"]
    sources = [str(s.relative_to(tools.ROOT)) for f in folders for s in sorted(f.glob("*.cpp"))]
    libraries = ["c10", "torch", "torch_cpu", "torch_python"]
    library_dirs = cpp_extension.library_paths()
    # at::parallel_for is a template: without OpenMP here it is a plain loop.
    cxx = ["-std=c++20", "-O3", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden", "-fopenmp"]
    # As system headers, torch's own warnings stay out of the report.
    system_includes = cpp_extension.include_paths()
    if plan.has_cuda:
        toolkit = tools.CudaToolkit.find()
        # A bare toolkit lacks the headers of cuBLAS and others; torch's own wheels have them.
        wheels = Path(torch.__file__).parent.parent / "nvidia"
        system_includes += [
            toolkit.home / "include",
            toolkit.home / "include/cccl",
            *sorted(wheels.glob("cu*/include")),
        ]
        library_dirs += [str(toolkit.library_dir)]
        libraries += ["c10_cuda", "cudart"]
        cxx += ["-DNEGINF_WITH_CUDA"]
    for include in system_includes:
        cxx += ["-isystem", str(include)]
    return Extension(
        "neginf._C",
        sources=sources,
        include_dirs=[str(tools.CSRC)],
        libraries=libraries,
        library_dirs=library_dirs,
        extra_compile_args={"cxx": cxx},
        extra_link_args=["-fopenmp"],
        language="c++",
    )


def facts(version, torch, plan):
    """Macros that the binding hands to Python as build_info()."""
    values = {
        "NEGINF_VERSION": version,
        "NEGINF_BUILD_TORCH": torch.__version__,
        "NEGINF_BUILD_CUDA": tools.CudaToolkit.find().version if plan.has_cuda else "",
        "NEGINF_BUILD_CUTLASS": tools.require_cutlass().version if plan.has_cuda else "",
        "NEGINF_BUILD_BACKENDS": ",".join(plan.backends),
    }
    return [f'-D{name}="{value}"' for name, value in values.items()]


torch = import_torch()
setup(**(options(torch) if torch else {}))
