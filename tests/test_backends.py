"""What a build says of itself: backends(), backend(), NEGINF_BACKEND, `python -m neginf info`."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import neginf
from neginf import _C
from neginf.backends import BACKENDS, Backend, Backends, install_command

ROOT = Path(__file__).resolve().parent.parent
NOT_BUILT = [name for name, b in neginf.backends().items() if not b.built]


def run_python(*args, **env):
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env={**os.environ, **env}
    )


def test_cpu_is_always_usable():
    cpu = neginf.backends()["cpu"]
    assert cpu.built
    assert cpu.usable
    assert {"forward", "backward", "combine", "combine_backward"} <= set(cpu.operations)


def test_backends_agree_with_the_registry_and_the_build_facts():
    built = [name for name, b in neginf.backends().items() if b.built]
    assert built == _C.build_info()["backends"].split(",")
    assert {arch for _, arch, _, _ in _C.kernels()} <= {*built, "cuda"}


def test_build_facts():
    facts = _C.build_info()
    assert facts["version"] == neginf.__version__
    assert facts["torch"] == torch.__version__
    has_cuda = facts["backends"] != "cpu"
    assert bool(facts["cuda"]) == bool(facts["cutlass"]) == has_cuda


def test_a_back_end_that_is_not_usable_says_what_to_do():
    for b in neginf.backends().values():
        assert b.usable == (b.why == "")
        if not b.built:
            assert install_command("cpu", b.name) in b.why


def test_printing_shows_operations_and_head_dims():
    operations = {"combine": (_C.ANY_HEAD_DIM,), "forward": (64, 128)}
    shown = str(Backends(sm80=Backend("sm80", built=True, usable=True, operations=operations)))
    assert re.fullmatch(
        r"sm80 +ready\n +combine +head_dim any\n +forward +head_dim <= 64, <= 128", shown
    )


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not a checkout")
def test_python_knows_the_back_ends_of_the_sources():
    folders = {file.parent.name for file in (ROOT / "csrc").glob("sm*/*.cu")}
    assert folders == set(BACKENDS) - {"cpu"}


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not a checkout")
def test_every_kernel_file_of_a_built_back_end_is_in_the_registry():
    built = _C.build_info()["backends"].split(",")
    for file in (ROOT / "csrc").glob("sm*/*_d*.cu"):
        operation, head_dim = re.fullmatch(r"(\w+)_d(\d+)", file.stem).groups()
        arch = file.parent.name
        if arch in built and not os.environ.get("NEGINF_HEAD_DIMS"):
            for dtype in ("bfloat16", "float16"):
                assert (operation, arch, dtype, int(head_dim)) in _C.kernels()


def test_backend_forces_and_restores():
    before = _C.get_backend()
    with neginf.backend("cpu"):
        assert _C.get_backend() == "cpu"
        with neginf.backend(None):
            assert _C.get_backend() is None
        assert _C.get_backend() == "cpu"
    assert _C.get_backend() == before


def test_backend_restores_after_an_error():
    before = _C.get_backend()
    with pytest.raises(ZeroDivisionError), neginf.backend("cpu"):
        raise ZeroDivisionError
    assert _C.get_backend() == before


def test_an_unknown_back_end_names_the_known_ones():
    with (
        pytest.raises(ValueError, match=r"backend: got 'sm12'; accepted are cpu, sm80, sm90"),
        neginf.backend("sm12"),
    ):
        pass


def test_a_back_end_that_is_not_built_names_the_variable_to_set(monkeypatch):
    monkeypatch.setattr(importlib.import_module("neginf.backends"), "_built", lambda: ["cpu"])
    with (
        pytest.raises(NotImplementedError, match=r"NEGINF_BACKENDS=cpu,sm80 .*pip install"),
        neginf.backend("sm80"),
    ):
        pass


def test_environment_variable_is_honoured_at_import():
    program = "import neginf; print(neginf._C.get_backend())"
    assert run_python("-c", program, NEGINF_BACKEND="cpu").stdout == "cpu\n"
    assert run_python("-c", program, NEGINF_BACKEND="").stdout == "None\n"
    wrong = run_python("-c", program, NEGINF_BACKEND="gpu")
    assert wrong.returncode != 0
    assert "NEGINF_BACKEND: got 'gpu'; accepted are cpu, sm80, sm90" in wrong.stderr


def test_info_command():
    result = run_python("-m", "neginf", "info")
    assert result.returncode == 0, result.stderr
    for text in (neginf.__version__, torch.__version__, str(neginf.backends())):
        assert text in result.stdout
    if NOT_BUILT:
        assert install_command(*BACKENDS) in result.stdout
    for i in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_name(i) in result.stdout
