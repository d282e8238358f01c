"""Runs the probes of every library, each library in a process of its own."""

import importlib.metadata
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import neginf
from neginf.audit import probes, specs

# The exit status of a worker whose last finding is written, but in which no further kernel can run.
BROKEN_DEVICE = 3


@dataclass
class Library:
    """One library and what was found."""

    name: str
    module: str
    version: str | None
    device: str
    why_not: str | None = None  # it cannot be probed here
    findings: dict[str, dict] = field(default_factory=dict)  # probe -> text, conforms


@dataclass
class Audit:
    """What an audit found, and where."""

    neginf: str
    torch: str
    gpu: str | None
    libraries: list[Library]

    def to_json(self):
        return json.dumps(asdict(self), indent=2) + "\n"


def audit(adapters=(), only=None, timeout_s=300):
    """Probes the built-in adapters and those of `adapters`.

    Args:
        adapters: files or modules that define subclasses of :class:`neginf.audit.Adapter`.
        only: names of libraries to probe; None is all.
        timeout_s: seconds that one library's process may run without finishing its probes; the
            probe it then hangs in is reported, and the others go on in a new process.

    Returns:
        :class:`Audit`.

    Raises:
        ValueError: an adapter that is not there, or a name in `only` that no adapter has.
    """
    chosen = {}
    for spec in [*specs.built_in(), *(s for source in adapters for s in specs.specs_in(source))]:
        chosen[specs.load(spec).name] = spec
    unknown = set(only or ()) - chosen.keys()
    if unknown:
        raise ValueError(
            f"only: got {', '.join(sorted(unknown))}; accepted are {', '.join(chosen)}"
        )
    libraries = [
        _audit_library(spec, timeout_s) for name, spec in chosen.items() if not only or name in only
    ]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return Audit(neginf.__version__, torch.__version__, gpu, libraries)


def _audit_library(spec, timeout_s):
    adapter = specs.load(spec)
    library = Library(adapter.name, adapter.module, _version(adapter.module), adapter.device)
    library.why_not = _why_not(adapter)
    if library.why_not is None:
        library.findings = _run(spec, timeout_s)
    return library


def _why_not(adapter):
    try:
        found = importlib.util.find_spec(adapter.module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        found = False
    except ImportError as error:
        return f"{adapter.module} cannot be imported: {error}"
    if not found:
        return f"{adapter.module} is not installed"
    if adapter.device == "cuda" and not torch.cuda.is_available():
        return "needs a GPU"
    return None


def _version(module):
    """Of the distribution that the module comes from, if there is one and no other."""
    if module == "neginf":
        return neginf.__version__
    package = module.split(".")[0]
    distributions = set(importlib.metadata.packages_distributions().get(package, ()))
    return importlib.metadata.version(distributions.pop()) if len(distributions) == 1 else None


def _run(spec, timeout_s):
    """All findings; a probe that ends the process is one, and the next process goes on after it."""
    findings = {}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        while remaining := [name for name in probes.NAMES if name not in findings]:
            end = _run_worker([spec, str(results), *remaining], timeout_s)
            lines = results.read_text().splitlines()
            for line in lines:
                finding = json.loads(line)
                findings[finding.pop("probe")] = finding
            results.write_text("")
            if not lines:  # the library itself may have exited, and with any status
                end = end or "ends the process"
            if end and (unfinished := [name for name in remaining if name not in findings]):
                findings[unfinished[0]] = {"text": end, "conforms": False}
    return findings


def _run_worker(arguments, timeout_s):
    """None if it ended as it should, else what became of it."""
    command = [sys.executable, "-m", "neginf.audit.worker", *arguments]
    try:
        done = subprocess.run(command, timeout=timeout_s, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return f"hangs (no result in {timeout_s} s)"
    if done.returncode in (0, BROKEN_DEVICE):
        return None
    if done.returncode < 0:
        return f"crashes the process: {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines()
    last = textwrap.shorten(lines[-1], 100, placeholder=" ...") if lines else "no message"
    return f"ends the process with status {done.returncode}: {last}"
