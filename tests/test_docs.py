"""Every code block of the documentation runs as it stands."""

import os
import pkgutil
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import neginf
from neginf import distributed
from neginf.audit import probes

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = ("README.md", *(str(page.relative_to(ROOT)) for page in DOCS))


def blocks():
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start(1))
            yield pytest.param("\n" * line + match[1], page, id=f"{page}:{line + 1}")


def run_on_ranks(code, folder):
    program = folder / "block.py"
    program.write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(program)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("code", "page"), list(blocks()))
def test_block(code, page, tmp_path):
    if "init_process_group" in code:
        run_on_ranks(code, tmp_path)
        return
    if "import AutoModel" in code:
        pytest.importorskip("transformers", reason="transformers is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code, str(ROOT / page), "exec"), {"__name__": "block"})


def test_the_example_of_an_adapter_can_be_probed():
    (code,) = [block.values[0] for block in blocks() if "(Adapter)" in block.values[0]]
    namespace = {}
    exec(code, namespace)
    findings = {name: probes.run(name, namespace["MyLibrary"]()) for name in probes.NAMES}
    assert findings["lse"] == ("ln, (batch, heads, seqlen)", True)
    assert findings["masked_row"] == ("out NaN, lse -inf", False)  # softmax of nothing


@pytest.mark.parametrize("page", ["README", "docs/index", "docs/interop", "docs/recipes"])
def test_pages_have_blocks(page):
    assert any(block.values[1] == f"{page}.md" for block in blocks())


def test_every_page_is_in_the_navigation():
    named = re.findall(r"^ +- .*: ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == [str(page.relative_to(ROOT / "docs")) for page in DOCS]


def documented():
    for page in DOCS:
        yield from re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", list(documented()))
def test_the_reference_names_what_there_is(name):
    if name.endswith(".transformers"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    assert pkgutil.resolve_name(name).__doc__


def test_the_reference_is_complete():
    names = set(documented())
    for module in (neginf, distributed):
        assert {f"{module.__name__}.{name}" for name in module.__all__} <= names
