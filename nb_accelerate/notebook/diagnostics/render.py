"""Tracebacks of ranks as text, with the lines of notebook cells.

A rank only knows file names and line numbers. The text of the lines is looked up here, in the kernel, where
IPython keeps every cell that ran.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.base.ipython_versions import is_module_level
from nb_accelerate.errors.traceback_lines import (
    FULL_TRACEBACK,
    PLAIN,
    FrameLine,
    frame_lines,
    highlight_type,
    is_ours,
    is_users,
    line_in_cell,
    wants_full,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nb_accelerate.errors.traceback_lines import Style
    from nb_accelerate.notebook.protocol.messages import ErrorReport, Frame

_CONTEXT = 2  # lines shown before and after the line of a cell
_MOST_OF_LIBRARIES = 2  # frames of libraries, one below the other, that are shown; of more, the innermost one is
_OUR_ERRORS = "nb_accelerate.errors."  # begins the last line of a traceback of one of our errors


def render_report(
    report: ErrorReport,
    *,
    title: str,
    footer: str = "",
    style: Style = PLAIN,
    called_from: Sequence[FrameLine] = (),
) -> str:
    """Return a traceback in IPython's manner: cells with the lines around, library code one line a frame.

    Frames of this package are left out, and most of libraries. Of an error of this package only the user's own lines
    are shown, since its text says the rest.

    Args:
        called_from: the user's lines that led to the launch, shown if the exception has no line of users' code.
    """
    name = report.type_name
    gap = " " * max(2, 75 - len(name) - len(title))
    lines = [f"{style.error}{name}{style.end}{gap}{title}"]
    if not any(is_users(frame.filename) for frame in report.frames):
        for frame in called_from:
            lines += frame_lines(frame, style)
    lines += _chain(report, style)
    if footer:
        lines += ["", footer]
    return "\n".join(lines)


def _chain(report: ErrorReport, style: Style) -> Iterator[str]:
    is_our_error = not wants_full() and any(line.startswith(_OUR_ERRORS) for line in report.last_lines[:1])
    if report.cause is not None and not is_our_error:
        yield from _chain(report.cause, style)
        yield ""
        yield (
            "The above exception was the direct cause of the following exception:"
            if report.explicit_cause
            else "During handling of the above exception, another exception occurred:"
        )
        yield ""
    shown = [
        frame
        for frame in report.frames
        if wants_full() or (is_users(frame.filename) if is_our_error else not is_ours(frame.filename))
    ]
    for of_user, run in itertools.groupby(shown, lambda frame: is_users(frame.filename)):
        frames = list(run)
        hidden = [] if of_user or wants_full() or len(frames) <= _MOST_OF_LIBRARIES else frames[:-1]
        if hidden:
            names = ", ".join(dict.fromkeys(_library(frame.filename) for frame in hidden))
            yield f"{style.faint}    ... {len(hidden)} frames of {names}; {FULL_TRACEBACK}=1 shows them{style.end}"
        for frame in frames[len(hidden) :]:
            line = FrameLine(frame.filename, frame.lineno, frame.name)
            yield from frame_lines(line, style, context=0 if is_our_error else _CONTEXT)
    yield ""
    *before, last = [line.rstrip("\n") for line in report.last_lines if line.strip()] or [report.type_name]
    yield from before
    yield highlight_type(last, style)
    for number, member in enumerate(report.group, start=1):
        yield f"  {style.faint}--- exception {number} of {report.group_size}{style.end}"
        yield from (f"  {line}" for line in _chain(member, style) if line)


def _library(filename: str) -> str:
    parts = Path(filename).parts
    folders = [number for number, part in enumerate(parts[:-1]) if part in ("site-packages", "dist-packages")]
    return parts[folders[-1] + 1].removesuffix(".py") if folders else "Python"


def place(frame: Frame | FrameLine) -> str:
    """Return where a frame is, in a few words: ``train, cell 7 line 12``."""
    where = line_in_cell(frame.filename, frame.lineno) or f"{frame.filename}:{frame.lineno}"
    return where if is_module_level(frame.name) else f"{frame.name}, {where}"
