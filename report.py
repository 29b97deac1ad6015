"""The report of the experiments: tables, provenance, and one file that stays readable.

    Finding  --section()-->  "## three-ways ..."  --merge()-->  results/report.md
                             table, figures, notes,             an introduction, then one section
                             where, when, how measured          an experiment, in their order

Every section says by itself when, on what machine, with which versions and by which command it was
measured, since sections of one report may come from different runs: a newer run of an experiment
replaces its section and leaves the others as they are.

Pure functions, but for `machine` and `versions`, which ask the system, and `record`, which writes
the files. Not here: how a figure is drawn (`figures.py`), what is measured (`experiments.py`), and
with what (`bench.py`). Read next: `bench.py`.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import Figure

INTRODUCTION = """# Measured beside published

One section an experiment, written by `python experiments.py`. A newer run of an experiment replaces
its section and leaves the others, so each says when, where and how it was measured. Published
figures are from other machines and models: shapes and ratios compare, seconds do not.
"""

# What can change the figures; a package that is not installed is left out.
PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class Finding:
    """What one experiment found: a table, what to say of it, and how many values it stands on.

    `files` (name to text) are written beside the report; `result`, for programs to read, is printed
    as the last line.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    n: str
    notes: Sequence[str] = ()
    model: str = "none"  # what was measured, its number type and device
    figures: Sequence[Figure] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]] = ()  # more: headers and rows


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table that is aligned as plain text, too."""
    lines = [list(header), *map(list, rows)]
    if any(len(line) != len(header) for line in lines):
        raise ValueError("a row has another number of cells than the header")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def section(name: str, title: str, finding: Finding, provenance: Sequence[str]) -> str:
    """Return an experiment's part of the report, without a line end after it."""
    tables = [(finding.header, finding.rows), *finding.tables]
    pictures = [f"![{figure.title}]({file_name(figure)})" for figure in finding.figures]
    notes = "\n".join(f"- {note}" for note in finding.notes)
    where = "; ".join([*stands_on(finding), *provenance])
    drawn = [markdown_table(header, rows) for header, rows in tables]
    parts = [f"## {name}", title, *drawn, *pictures, notes, f"*{where}*"]
    return "\n\n".join(filter(None, parts))


def stands_on(finding: Finding) -> list[str]:
    """Return what section and figures say alike: how many values, and of which model."""
    return [f"n = {finding.n}", f"model: {finding.model}"]


def file_name(figure: Figure) -> str:
    """Return the name of a figure's file, beside the report."""
    return f"{figure.name}.svg"


def merge(report: str, sections: Iterable[str], order: Sequence[str]) -> str:
    """Return `report` with each of `sections` put in place of the one of its name.

    Sections stand in the `order` of their names, those it does not name at the end.
    """
    _, *old = re.split(r"^(?=## )", report, flags=re.MULTILINE)
    by_name = {_name(text): text.strip() for text in (*old, *sections)}
    known = [by_name.pop(name) for name in order if name in by_name]
    return "\n\n".join([INTRODUCTION.strip(), *known, *by_name.values()]) + "\n"


def record(
    path: Path,
    sections: Iterable[str],
    order: Sequence[str],
    files: Mapping[str, str] | None = None,
) -> None:
    """Merge `sections` into the report at `path`, which need not exist; write `files` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, text in (files or {}).items():
        _write(path.with_name(name), text)
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    _write(path, merge(old, sections, order))


def _write(path: Path, text: str) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)  # a file is whole or old, whatever ends this process


def _name(section: str) -> str:
    return section.partition("\n")[0].removeprefix("## ").strip()


# Where and with what


def machine() -> str:
    """Return the processor's name, the number of cores for us, and the system."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # only Linux has it
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
        name = found[1].strip() if found else name
    own = getattr(os, "sched_getaffinity", None)
    cores = len(own(0)) if own else os.cpu_count() or 1
    return f"{name}, {cores} core{'s' * (cores != 1)}, {platform.system()}"


def versions() -> str:
    """Return the versions of Python and of what the model runs on."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)


# How figures are written


def seconds(value: float | None) -> str:
    """Return a duration in the unit that reads best."""
    if value is None:
        return "n/a"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def milliseconds(value: float | None) -> str:
    """Return a duration in milliseconds and tenths of them, given in seconds."""
    return "n/a" if value is None else f"{value * 1000:,.1f} ms"


def times(value: float) -> str:
    """Return a ratio."""
    return f"{value:.2f}x" if value < 2 else f"{value:.1f}x"


def span(values: Sequence[float], digits: int = 0) -> str:
    """Return the one value that all have, or the lowest and the highest."""
    low, high = (f"{value:,.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
