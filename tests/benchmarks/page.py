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

_WORSE = 0.2
"""Part of a ratio of the last release by which one is greater that is marked."""

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


def beside_release(sections: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each ratio beside that of the page, which is the last release's, and a mark at what is a fifth worse.

    Of a line that was measured in several runs the best ratio counts: what is worse is worse in all of them.
    """
    release = _ratios(sections_of(_as_printed(PAGE.read_text(encoding="utf-8"))))
    lines = []
    for key, now in _ratios(sections).items():
        before = release.get(key, [])
        if len(before) == len(now):
            is_worse = any(new - old > _WORSE * abs(old) for new, old in zip(now, before, strict=True))
            was, found = (", ".join(f"{ratio:.4g}" for ratio in ratios) for ratios in (before, now))
            lines.append(f"{found:>14} was {was:<14} {'WORSE ' if is_worse else '      '}{': '.join(key)}")
    return lines


def _ratios(sections: Mapping[str, Sequence[str]]) -> dict[tuple[str, ...], list[float]]:
    """Return the ratios of lines, by their subject, the line that they are below, and what they say themselves."""
    found: dict[tuple[str, ...], list[float]] = {}
    for subject, lines in sections.items():
        above = ""
        for line in lines:
            text = re.sub(r"\([^()]*\)", "", line)  # times are in parentheses
            label = re.split(r"-?\b\d+\.\d+", text)[0].strip()
            ratios = [float(number) for number in re.findall(r"-?\b\d+\.\d+", text)]
            key = (subject, above, label) if line.startswith(" ") else (subject, label)
            above = above if line.startswith(" ") else label
            if ratios and not re.search(rf"\b(?:{'|'.join(BESIDE)}|torchrun|python)\b", label.replace("nb-a", "nb_a")):
                best = zip(ratios, found.get(key, ratios), strict=False)
                found[key] = [min(pair) for pair in best]
    return found


def _as_printed(text: str) -> str:
    """Return the lines of the page as `run.py` has printed them."""
    parts = re.findall(r"^## (.+?)\n.*?```text\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    return "\n".join(f"{subject.lower()}\n" + re.sub("^", "  ", lines, flags=re.MULTILINE) for subject, lines in parts)


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
