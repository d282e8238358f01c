"""An audit as Markdown, and as a table in the terminal."""

from neginf.audit import probes

HEADINGS = {
    "lse": "lse",
    "masked_row": "masked row",
    "no_keys": "no keys",
    "zero_length_sequence": "zero-length sequence",
    "nan_score": "one NaN score",
    "nan_row": "all scores NaN",
    "split": "two splits",
    "merge_of_empties": "merge of two empties",
    "plus_infinity": "+inf merged in",
    "backward": "backward, masked row",
    "backward_of_lse": "gradient through lse",
}
assert list(HEADINGS) == probes.NAMES

NOTE = (
    "A cell says what the library did. **Bold**: not what docs/contract.md asks for. -: there is "
    "no such function."
)


def markdown(audit):
    """One row per library that was probed, and a list of those that were not."""
    probed, not_probed = _by_outcome(audit)
    lines = [_title(audit), "", NOTE, ""]
    lines.append("| library | " + " | ".join(HEADINGS.values()) + " |")
    lines.append("|---" * (len(HEADINGS) + 1) + "|")
    for library in probed:
        cells = [_emphasised(library.findings[name]) for name in HEADINGS]
        lines.append(f"| {_label(library)} | " + " | ".join(cells) + " |")
    lines += ["", *(f"* {lib.name}: not probed, {lib.why_not}." for lib in not_probed)]
    return "\n".join(lines).rstrip() + "\n"


def show(audit):
    """Prints the findings, in colour; without rich, the Markdown."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(markdown(audit))
        return
    probed, not_probed = _by_outcome(audit)
    console = Console()
    table = Table(title=_title(audit), caption="red: not what docs/contract.md asks for")
    for column in ("library", "probe", "what it did"):
        table.add_column(column, overflow="fold")
    for library in probed:
        label = _label(library)
        for name, heading in HEADINGS.items():
            finding = library.findings[name]
            table.add_row(label, heading, Text(finding["text"], style=_style(finding)))
            label = ""
        table.add_section()
    console.print(table)
    for library in not_probed:
        console.print(f"{library.name}: not probed, {library.why_not}", highlight=False)


def _by_outcome(audit):
    probed = [library for library in audit.libraries if library.why_not is None]
    return probed, [library for library in audit.libraries if library.why_not is not None]


def _title(audit):
    where = audit.gpu or "no GPU"
    return f"What attention libraries return (neginf {audit.neginf}, torch {audit.torch}, {where})"


def _label(library):
    version = f" {library.version}" if library.version else ""
    return f"{library.name}{version}, {library.device}"


def _emphasised(finding):
    text = finding["text"].replace("|", "\\|")
    return f"**{text}**" if finding["conforms"] is False else text


def _style(finding):
    return {True: "green", False: "red", None: ""}[finding["conforms"]]
