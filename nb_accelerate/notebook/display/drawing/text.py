"""A `View` as text: a line for a log, and the whole for terminals and for readers without HTML.

In a terminal it is as wide as that, with columns left out rather than cut, and in colours.
"""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, TextIO

from nb_accelerate.notebook.display.view import FIGURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.view import BarLine, Row, View

_ANY_WIDTH = 1_000_000

_TITLES = {"ranks": "rank", "bar": "", **dict(FIGURES)}

# Figures that are left out of narrow terminals, the first one first.
_LEFT_OUT = ("gpu", "memory", "epoch", "rate", "loss")

# Characters of a progress bar, and of one in a narrow terminal; in a very narrow one there is none.
_BAR, _SHORT_BAR = 12, 6

_FEWEST_SAID = 14  # characters that the last column has at least before another one is left out

_STATES = {"starting": "36", "running": "36", "done": "32", "failed": "31", "interrupted": "33", "stopped": "33"}
_KINDS = {"bad": "31", "late": "33", "done": "32"}
_FAINT, _WRONG = "2", "33"  # colours, as the numbers of the sequence of escapes that selects them (ECMA-48, SGR)


def line(view: View) -> str:
    """Return a view as one line of a log; at the end with lines that say where the time went."""
    if view.state not in ("starting", "running"):
        ends = ", ".join([f"{view.facts.name}: {view.state} in {view.elapsed}", *view.summary])
        return "\n".join([ends, *_times(view)])
    parts = [f"{view.facts.name}: {view.elapsed}"]
    well = [row for row in view.rows if row.kind != "bad"] or view.rows
    row = min(well, key=lambda row: row.share or 0.0, default=None)  # the slowest one stands for all
    if row is not None and row.step:
        share = "" if row.share is None else f" ({100 * row.share:.0f} %)"
        # Where the number of epochs is known, steps are counted over the whole run.
        epoch = f"{',' if 'of' in row.epoch else ' of'} epoch {row.epoch}" if row.epoch else ""
        parts.append(f"step {row.step.replace(' ', '')}{share}{epoch}")
        parts += [f"{row.rate} it/s"] if row.rate not in ("", "-") else []
        parts += [f"loss {row.loss}"] if row.loss else []
    for bar in view.bars[:2]:
        parts.append(f"{bar.label} {bar.text}".strip())
    return ", ".join([*parts, *view.outlook])


def table(view: View, *, bars: bool = False) -> str:
    """Return the whole panel, in lines as long as they are."""
    return "\n".join(lines(view, _ANY_WIDTH, bars=bars))


def lines(view: View, width: int, *, color: bool = False, bars: bool = False) -> list[str]:
    """Return the whole panel, in lines no wider than ``width``."""
    remarks = [*([view.held] if view.held else []), *view.warnings, *_times(view), *view.notes]
    said = [line for remark in remarks for line in remark.split("\n")]
    return [
        _head(view, width, color=color),
        *_table(view.rows, width, color=color, bars=bars),
        *_bars(view.bars, width, color=color, drawn=bars),
        *(part for line in said for part in textwrap.wrap(line, width) or [""]),
    ]


def can_color(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with colours, and nobody has switched them off (https://no-color.org)."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")


def _times(view: View) -> list[str]:
    """Return where the time of a run that has ended went, and advice."""
    if view.state in ("starting", "running"):
        return []
    return [*([f"time: {view.times}"] if view.times else []), *([view.advice] if view.advice else [])]


def _head(view: View, width: int, *, color: bool) -> str:
    """Return the first line; of what it says about the launch, the last is left out first."""
    about = list(view.facts.setup)
    parts = [f"{view.mark} {view.facts.name}", *about, view.elapsed, *(view.summary or view.outlook)]
    while len(" · ".join(parts)) > width and len(parts) > 1:
        parts.pop(len(about) if about else -1)
        del about[-1:]
    head = _cut(" · ".join(parts), width)
    shade = _WRONG if view.mark == "!" else _STATES[view.state]
    return f"{_colored(head[:1], shade, color)}{head[1:]}"


def _table(rows: Sequence[Row], width: int, *, color: bool, bars: bool) -> list[str]:
    if not rows:
        return []
    titles_of = {**_TITLES, "ranks": "rank"}
    names = ["ranks", *(name for name, _ in FIGURES if any(getattr(row, name) for row in rows))]
    widths = {name: max(len(titles_of[name]), *(len(getattr(row, name)) for row in rows)) for name in names}
    if bars and any(row.share is not None for row in rows):
        widths = {"ranks": widths.pop("ranks"), "bar": _BAR, **widths}
    said = min(_FEWEST_SAID, max(len(row.said) for row in rows))

    def is_too_wide() -> bool:
        return sum(number + 2 for number in widths.values()) + said > width

    # If the row is too wide, the bar becomes shorter, then columns go, and the bar last.
    if "bar" in widths and is_too_wide():
        widths["bar"] = _SHORT_BAR
    for name in (*_LEFT_OUT, "bar"):
        if name in widths and is_too_wide():
            del widths[name]
    left = max(0, width - sum(number + 2 for number in widths.values()))
    color = color and left > 0  # else lines are cut, and colours cannot be
    titles = "  ".join([*(titles_of[name].rjust(number) for name, number in widths.items()), "now"])
    table = [_colored(_cut(titles, width), _FAINT, color)]
    for row in rows:
        shade = _KINDS.get(row.kind, "")
        cells = [
            _bar(row, number, shade, color) if name == "bar" else getattr(row, name).rjust(number)
            for name, number in widths.items()
        ]
        text = "  ".join([*cells, _colored(_cut(row.said, left), shade, color)]).rstrip()
        table.append(text if color else _cut(text, width))
    return table


def _bars(bars: Sequence[BarLine], width: int, *, color: bool, drawn: bool) -> list[str]:
    labels = [f"{'  ' * bar.depth}{bar.label}" for bar in bars]
    longest = max(map(len, labels), default=0)
    drawn = drawn and any(bar.share is not None for bar in bars) and longest + _BAR + _FEWEST_SAID < width
    found = []
    for bar, label in zip(bars, labels, strict=True):
        shade = {"done": _KINDS["done"], "ended": _FAINT}.get(bar.kind, "")
        line = [label.ljust(longest)] if longest else []
        line += [_bar(bar, _BAR, shade, color)] if drawn else []
        left = width - longest - (_BAR + 2 if drawn else 0) - 2
        text = "  ".join([*line, _cut(bar.text, max(0, left))]).rstrip()
        found.append(text if drawn else _cut(text, width))
    return found


def _bar(row: Row | BarLine, width: int, shade: str, color: bool) -> str:
    if row.share is None:
        return " " * width
    full = round(width * row.share)
    return _colored("━" * full, shade or "36", color) + _colored("╌" * (width - full), _FAINT, color)


def _colored(text: str, shade: str, color: bool) -> str:
    return f"\x1b[{shade}m{text}\x1b[0m" if color and shade and text else text


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"[:width]
