"""The page of benchmarks: what `make bench ARGS=--page` measured, on which machine, and when."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

PAGE = Path(__file__).parents[2] / "notebooks" / "benchmarks.md"
BESIDE = ("accelerate", "ipyparallel", "nbdistributed", "ipykernel", "numpy")
_INTRO = """\
# Benchmarks

Made by `make bench ARGS=--page`, from `tests/benchmarks/`. Numbers in one block were taken in turns, in one run:
compare their ratios. Seconds say as much about the machine, which did other work meanwhile, as about the code.

| | |
|---|---|
"""


def sections_of(printed: str) -> dict[str, list[str]]:
    """Return the lines of each subject from what `run.py` has printed, without the warnings of others."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in printed.splitlines():
        if line.startswith("  "):
            lines.append(line[2:])
        elif re.fullmatch(r"[a-z ]+", line):
            lines = found.setdefault(line, [])
    return {subject: lines for subject, lines in found.items() if lines}


def _version(name: str) -> str:
    """Return the version of a package; "" if it is not installed, as those to compare with may be not."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def render(sections: Mapping[str, Sequence[str]], date: float) -> str:
    """Return the page.

    Args:
        sections: the lines of each subject.
        date: when they were measured, in seconds since 1970.
    """
    memory = psutil.virtual_memory().total / 2**30
    facts = {
        "date": time.strftime("%d %B %Y", time.gmtime(date)),
        "machine": f"{_processor()}, {psutil.cpu_count()} cores, {memory:.0f} GiB, no GPU",
        "system": f"{platform.system()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version}" for name in ("torch", *BESIDE) if (version := _version(name))),
    }
    text = _INTRO + "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    for subject, lines in sections.items():
        text += (
            f"\n## {subject.capitalize()}\n\n{_about(subject)}\n\n```text\n" + "\n".join(lines).strip("\n") + "\n```\n"
        )
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def _processor() -> str:
    try:
        (name,) = set(re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        name = platform.processor() or platform.machine()
    return f"{name} ({os.uname().machine})"


def _about(subject: str) -> str:
    source = Path(__file__).with_name(f"bench_{subject.replace(' ', '_')}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return " ".join(docstring.split("\n\n")[0].split())
