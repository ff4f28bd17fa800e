"""Tracebacks and stacks of ranks as text, with the lines of notebook cells.

A rank only knows file names and line numbers. The text of the lines is looked up here, in the kernel, where
IPython keeps every cell that ran.
"""

from __future__ import annotations

import linecache
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.protocol.messages import ErrorReport, Frame

_CONTEXT = 2
"""Lines shown before and after the line of a cell."""


class Style(NamedTuple):
    """ANSI sequences, or empty strings."""

    error: str = ""
    where: str = ""
    faint: str = ""
    end: str = ""


PLAIN = Style()
ANSI = Style(error="\x1b[31m", where="\x1b[32m", faint="\x1b[2m", end="\x1b[0m")


def render_report(report: ErrorReport, *, title: str, footer: str = "", style: Style = PLAIN) -> str:
    """A traceback in IPython's manner: cells with the lines around, library code one line a frame.

    Args:
        report: the exception.
        title: stands at the right of the first line, e.g. ``rank 1 of 2``.
        footer: said after the exception.
        style: colours.
    """
    name = report.type_name
    gap = " " * max(2, 75 - len(name) - len(title))
    lines = [f"{style.error}{name}{style.end}{gap}{title}"]
    lines += _chain(report, style)
    if footer:
        lines += ["", footer]
    return "\n".join(lines)


def _chain(report: ErrorReport, style: Style) -> Iterator[str]:
    if report.cause is not None:
        yield from _chain(report.cause, style)
        yield ""
        yield (
            "The above exception was the direct cause of the following exception:"
            if report.explicit_cause
            else "During handling of the above exception, another exception occurred:"
        )
        yield ""
    for frame in report.frames:
        yield from _frame(frame, style)
    yield ""
    *before, last = [line.rstrip("\n") for line in report.last_lines if line.strip()] or [report.type_name]
    yield from before
    kind, colon, text = last.partition(":")
    yield f"{style.error}{kind}{style.end}{colon}{text}"
    for number, one in enumerate(report.group, start=1):
        yield f"  {style.faint}--- exception {number} of {report.group_size}{style.end}"
        yield from (f"  {line}" for line in _chain(one, style) if line)


def _frame(frame: Frame, style: Style) -> Iterator[str]:
    cell = cell_name(frame.filename)
    if cell is None:
        yield f"File {style.where}{frame.filename}:{frame.lineno}{style.end}, in {frame.name}"
        text = linecache.getline(frame.filename, frame.lineno).strip()
        if text:
            yield f"    {text}"
        return
    yield f"{style.where}{cell}, line {frame.lineno}{style.end}, in {frame.name}"
    count = len(linecache.getlines(frame.filename))
    for lineno in range(max(1, frame.lineno - _CONTEXT), min(count, frame.lineno + _CONTEXT) + 1):
        text = linecache.getline(frame.filename, lineno).rstrip("\n")
        if lineno == frame.lineno:
            yield f"{style.error}{'---> ' + str(lineno):>10}{style.end} {text}"
        else:
            yield f"{style.faint}{lineno:>10}{style.end} {text}"


def cell_name(filename: str) -> str | None:
    """``Cell In[7]`` if the file is a cell of the notebook that runs here, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return None
    known = shell.compile.format_code_name(filename)
    return " ".join(known) if known else None


def place(frame: Frame) -> str:
    """Where a frame is, in a few words: ``train, Cell In[7] line 12``."""
    cell = cell_name(frame.filename)
    where = f"{cell} line {frame.lineno}" if cell else f"{frame.filename}:{frame.lineno}"
    return f"{frame.name}, {where}"
