"""Every code block of the documentation runs as it stands."""

import re
import warnings
from pathlib import Path

import pytest

from neginf.audit import probes

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/interop.md")


def blocks():
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start(1))
            yield pytest.param("\n" * line + match[1], page, id=f"{page}:{line + 1}")


@pytest.mark.parametrize(("code", "page"), list(blocks()))
def test_block(code, page):
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


def test_pages_have_blocks():
    counts = {page: sum(block.values[1] == page for block in blocks()) for page in PAGES}
    assert all(counts.values()), counts
