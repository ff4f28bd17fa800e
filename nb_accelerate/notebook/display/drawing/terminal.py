"""A `View` as lines for a terminal: as wide as it is, with columns left out rather than cut, and in colours."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, TextIO

from nb_accelerate.notebook.display.drawing import text
from nb_accelerate.notebook.display.view import FIGURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.view import Row, View

_LEFT_OUT = ("cpu", "gpu", "memory", "epoch", "rate", "loss")
"""Figures that are left out of narrow terminals, the first one first."""

_BAR, _SHORT_BAR = 12, 6
"""Characters of a progress bar, and of one in a narrow terminal; in a very narrow one there is none."""

_FEWEST_SAID = 14
"""Characters that the last column has at least before another one is left out."""

_STATES = {"starting": "36", "running": "36", "done": "32", "failed": "31", "interrupted": "33", "stopped": "33"}
_KINDS = {"bad": "31", "late": "33", "done": "32"}
_FAINT, _WRONG = "2", "33"
"""Colours, as the numbers of the sequence of escapes that selects them (ECMA-48, SGR)."""


def can_color(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with colours, and nobody has switched them off (https://no-color.org)."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")


def lines(view: View, width: int, *, color: bool, bars: bool = False) -> list[str]:
    """Return the panel in lines of which none is wider than a terminal."""
    head, *below = text.table(view).split("\n")
    rows = (*view.bars, *view.rows)
    remarks = below[len(rows) + 1 :] if rows else below
    return [
        _head(view, head, width, color=color),
        *_table(rows, width, color=color, bars=bars),
        *(part for remark in remarks for part in textwrap.wrap(remark, width) or [""]),
    ]


def _head(view: View, head: str, width: int, *, color: bool) -> str:
    """Return the first line; of what it says about the launch, the last is left out first."""
    parts = head.split(" · ")
    about = len(view.facts.setup)
    while len(" · ".join(parts)) > width and len(parts) > 1:
        parts.pop(about if about else -1)
        about = max(0, about - 1)
    fitting = _cut(" · ".join(parts), width)
    shade = _WRONG if view.mark == "!" else _STATES[view.state]
    return f"{_colored(fitting[:1], shade, color)}{fitting[1:]}"


def _table(rows: Sequence[Row], width: int, *, color: bool, bars: bool) -> list[str]:
    if not rows:
        return []
    names = [name for name, _ in FIGURES if any(getattr(row, name) for row in rows)]
    titles = {"ranks": "rank", "said": "now", "bar": "", **dict(FIGURES)}
    has_bars = bars and any(row.share is not None for row in rows)
    bar = _BAR if has_bars else 0

    def widths() -> dict[str, int]:
        shown = ["ranks", *(["bar"] if bar else []), *names]
        return {
            name: bar if name == "bar" else max(len(titles[name]), *(len(getattr(row, name)) for row in rows))
            for name in shown
        }

    def too_wide() -> bool:
        said = min(_FEWEST_SAID, max(len(row.said) for row in rows))
        return sum(number + 2 for number in widths().values()) + said > width

    bar = min(bar, _SHORT_BAR) if too_wide() else bar
    for name in _LEFT_OUT:
        if name in names and too_wide():
            names.remove(name)
    bar = 0 if too_wide() else bar
    used = widths()
    left = max(0, width - sum(number + 2 for number in used.values()))
    color = color and left > 0  # else lines are cut, and colours cannot be
    top = "  ".join([*(titles[name].rjust(number) for name, number in used.items()), titles["said"]])
    return [
        _colored(_cut(top, width), _FAINT, color),
        *(_cut_row(row, used, left, width, color=color) for row in rows),
    ]


def _cut_row(row: Row, used: dict[str, int], left: int, width: int, *, color: bool) -> str:
    shade = _KINDS.get(row.kind, "")
    cells = []
    for name, number in used.items():
        if name != "bar":
            cells.append(getattr(row, name).rjust(number))
            continue
        full = round(number * (row.share or 0.0))
        rest = number - full
        drawn = _colored("━" * full, shade or "36", color) + _colored("╌" * rest, _FAINT, color)
        cells.append(drawn if row.share is not None else " " * number)
    said = _cut(row.said, left)
    if not color:
        return _cut("  ".join([*cells, said]).rstrip(), width)
    return "  ".join([*cells, _colored(said, shade, color)]).rstrip()


def _colored(said: str, shade: str, color: bool) -> str:
    return f"\x1b[{shade}m{said}\x1b[0m" if color and shade and said else said


def _cut(said: str, width: int) -> str:
    return said if len(said) <= width else f"{said[: max(0, width - 1)]}…"[:width]
