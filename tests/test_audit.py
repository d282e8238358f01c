"""`python -m neginf audit`: what it finds in libraries that do right, do wrong, or crash."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import audit_adapters
from neginf import audit as audit_package
from neginf.audit import lse as lses
from neginf.audit import probes, report, runner, worker

ADAPTERS = Path(__file__).with_name("audit_adapters.py")
LAYOUT = "(batch, heads, seqlen)"
NEG_INF = float("-inf")


@pytest.fixture(scope="module")
def found():
    """An audit, in processes of their own."""
    names = ["neginf", "torch flash, CPU", "FlashAttention-3", "ends", "absent"]
    result = audit_package.audit([str(ADAPTERS)], only=names, timeout_s=15)
    assert [library.name for library in result.libraries] == names
    return result


def findings_of(found, name):
    (library,) = [lib for lib in found.libraries if lib.name == name]
    assert library.why_not is None
    assert list(library.findings) == probes.NAMES
    return {probe: (f["text"], f["conforms"]) for probe, f in library.findings.items()}


def probe(adapter):
    """The findings of an adapter, in this process."""
    return {name: tuple(probes.run(name, adapter())) for name in probes.NAMES}


def test_this_library_conforms(found):
    findings = findings_of(found, "neginf")
    assert {conforms for _, conforms in findings.values()} == {True}
    assert findings["lse"][0] == f"ln, {LAYOUT}"
    assert findings["masked_row"][0] == findings["no_keys"][0] == "out 0, lse -inf"
    assert findings["nan_score"][0] == findings["nan_row"][0] == "out NaN, lse NaN"
    assert findings["split"][0] == "equal; NaN: out NaN, lse NaN"
    assert findings["backward"][0] == "dq 0; NaN in its dout ignored"
    assert findings["backward_of_lse"][0] == "right"


def test_plus_infinity():
    findings = probe(audit_adapters.PlusInfinity)
    assert findings["lse"] == (f"ln, {LAYOUT}", True)
    assert findings["masked_row"] == findings["no_keys"] == ("out 0, lse +inf", False)
    assert findings["zero_length_sequence"] == ("out 0, lse +inf; (heads, tokens)", False)
    assert findings["nan_score"] == findings["nan_row"] == ("out NaN, lse +inf", False)
    assert findings["split"] == ("-", None)
    assert findings["merge_of_empties"] == ("out NaN, lse -inf", False)
    assert findings["plus_infinity"] == ("out NaN, lse +inf", False)


def test_base_two_and_a_sentinel():
    findings = probe(audit_adapters.BaseTwo)
    assert findings["lse"] == ("log2, (tokens, heads)", False)
    assert findings["masked_row"] == findings["no_keys"] == ("out 0, lse -1e+30", False)
    assert findings["zero_length_sequence"] == ("out 0, lse -1e+30; (tokens, heads)", False)
    assert findings["nan_score"] == ("out NaN, lse NaN", True)
    assert findings["merge_of_empties"] == ("out 0, lse -inf", True)
    assert findings["plus_infinity"] == ("out 0, lse 0", False)
    assert findings["backward_of_lse"] == ("right", True)


def test_a_split_with_nan_that_is_dropped():
    findings = probe(audit_adapters.DropsNan)
    text = "equal; NaN: out NaN, lse -inf becomes out finite, lse finite"
    assert findings["split"] == (text, False)
    assert findings["nan_score"] == ("out NaN, lse -inf", False)
    assert findings["backward_of_lse"] == ("none", None)


def test_padded_layouts():
    findings = probe(audit_adapters.Padded)
    assert findings["lse"] == ("ln, (batch, heads, padded seqlen)", True)
    assert findings["masked_row"] == ("out 0, lse -inf", True)
    expected = "out 0, lse -inf; (batch, heads, padded seqlen)"
    assert findings["zero_length_sequence"] == (expected, True)
    assert findings["backward_of_lse"] == ("0, without an error", False)


def test_a_mask_aligned_otherwise():
    finding = probes.run("masked_row", audit_adapters.TopLeft())
    assert finding == ("the row sees keys: the mask is aligned otherwise", False)


def test_an_lse_that_is_none():
    findings = probe(audit_adapters.Nonsense)
    assert findings["lse"] == ("not understood, shape (2, 4, 9)", False)
    assert findings["masked_row"] == ("lse not understood, shape (2, 4, 9)", False)


def test_a_probe_that_ends_the_process_costs_that_probe(found):
    findings = findings_of(found, "ends")
    assert findings["lse"][1]
    assert findings["masked_row"] == ("out 0, lse -inf", True)
    assert findings["no_keys"] == ("crashes the process: SIGABRT", False)
    assert findings["zero_length_sequence"][0].startswith("ends the process with status 7")
    assert findings["split"] == ("hangs (no result in 15 s)", False)
    raises = "raises RuntimeError: no kernel for this, nor for that"
    assert findings["merge_of_empties"] == findings["plus_infinity"] == (raises, False)
    assert findings["backward_of_lse"] == ("right", True)


@pytest.mark.parametrize("status", [0, runner.BROKEN_DEVICE])
def test_a_library_that_exits_with_a_status_of_the_worker(monkeypatch, status):
    """Each probe is tried once, not for ever."""
    done = subprocess.CompletedProcess((), status, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    findings = runner._run("any:Library", 1)
    assert list(findings) == probes.NAMES
    assert {f["text"] for f in findings.values()} == {"ends the process"}


def test_a_broken_device_costs_the_probe_that_broke_it(tmp_path, monkeypatch):
    """Its finding is there, the process ends, and the next probe is not blamed."""
    spec = f"{ADAPTERS}:PlusInfinity"
    monkeypatch.setattr(audit_adapters.PlusInfinity, "device", "cuda")
    monkeypatch.setattr(worker, "load", lambda _: audit_adapters.PlusInfinity)
    monkeypatch.setattr(worker, "_device_works", lambda: False)
    results = tmp_path / "results"
    with pytest.raises(SystemExit) as stopped:
        worker.main(spec, results, ["backward", "split"])
    assert [json.loads(line)["probe"] for line in results.read_text().splitlines()] == ["backward"]

    done = subprocess.CompletedProcess((), stopped.value.code, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert runner._run_worker([], 1) is None


def test_what_is_not_installed_is_named(found):
    reasons = {lib.name: lib.why_not for lib in found.libraries if lib.why_not}
    assert reasons["absent"] == "no_such_package.no_such_module is not installed"


def test_torch_on_the_cpu(found):
    """What it does is torch's affair; that every probe has a finding is ours."""
    findings = findings_of(found, "torch flash, CPU")
    assert findings["lse"] == (f"ln, {LAYOUT}", True)
    assert findings["nan_score"] == ("out NaN, lse NaN", True)


def test_json(found):
    data = json.loads(found.to_json())
    assert data["torch"] == torch.__version__
    ours = data["libraries"][0]
    assert (ours["name"], ours["why_not"]) == ("neginf", None)
    assert ours["findings"]["masked_row"] == {"text": "out 0, lse -inf", "conforms": True}


def test_markdown(found):
    lines = report.markdown(found).splitlines()
    header = next(line for line in lines if line.startswith("| library"))
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "library", *report.HEADINGS.values(),
    ]  # fmt: skip
    rows = [line for line in lines if line.startswith("|")]
    assert {row.count("|") for row in rows} == {len(probes.NAMES) + 2}
    (wrong,) = [row for row in rows if row.startswith("| ends")]
    assert "| **crashes the process: SIGABRT** |" in wrong
    (ours,) = [row for row in rows if row.startswith("| neginf")]
    assert "**" not in ours
    assert "* absent: not probed, no_such_package.no_such_module is not installed." in lines


def run(*arguments):
    command = [sys.executable, "-m", "neginf", "audit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_command(tmp_path):
    files = tmp_path / "audit.json", tmp_path / "audit.md"
    done = run(
        "--only", "drops NaN", "--adapter", ADAPTERS, "--json", files[0], "--markdown", files[1]
    )
    assert done.returncode == 0, done.stderr
    assert "drops NaN" in done.stdout
    assert "out NaN, lse -inf" in done.stdout
    assert json.loads(files[0].read_text())["libraries"][0]["name"] == "drops NaN"
    assert files[1].read_text().startswith("What attention libraries return")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "no library"), "only: got no library; accepted are neginf, torch flash, CPU"),
        (("--adapter", "no_such_file.py"), "adapter: got no_such_file.py, which does not exist"),
        (("--adapter", Path(report.__file__)), "which defines none; accepted is a file or module"),
        (("--adapter", "no_such_module"), "adapter: got no_such_module: No module named"),
        (("--adapter", f"{ADAPTERS}:Missing"), "accepted is a class that"),
    ],
)
def test_bad_arguments(arguments, message):
    done = run(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_importing_the_audit_imports_no_library():
    program = (
        "import sys, neginf\n"
        "assert not {'rich', 'transformers', 'neginf.audit', 'neginf.compat'} & set(sys.modules)\n"
        "import neginf.audit.report, neginf.audit.specs\n"
        "neginf.audit.specs.built_in()\n"
        "assert not {'rich', 'flash_attn', 'flashinfer', 'xformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


SIZES = (2, 4, 9)


@pytest.mark.parametrize("base", ["ln", "log2"])
@pytest.mark.parametrize(
    ("layout", "arrange"),
    [
        (LAYOUT, lambda lse: lse),
        ("(batch, seqlen, heads)", lambda lse: lse.transpose(1, 2)),
        ("(batch, heads, seqlen, 1)", lambda lse: lse[..., None]),
        ("(batch, heads, padded seqlen)", lambda lse: torch.nn.functional.pad(lse, (0, 7))),
        ("(tokens, heads)", lambda lse: lse.transpose(1, 2).reshape(18, 4)),
        ("(heads, tokens)", lambda lse: lse.transpose(0, 1).reshape(4, 18)),
    ],
)
def test_every_layout_and_base_is_detected(base, layout, arrange):
    expected = torch.randn(SIZES, dtype=torch.float64)
    lse = arrange(expected / lses.BASES[base])
    detected = lses.detect(lse, expected)
    assert detected == (base, layout)
    assert torch.equal(detected.arranged(lse, *SIZES), expected / lses.BASES[base])
    assert lses.detect(lse + 0.1, expected) is None
    assert lses.detect(lse.flatten(), expected) is None
