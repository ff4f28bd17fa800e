"""The table of `show_map` as text and as HTML, with a bar for each place."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    Row = tuple[str, int, float, str, str]
    """Name, number of equal ones, bytes of each, where it computes, where it rests."""

_TITLES = ("module", "bytes", "computes on", "rests in")

_COLOURS = ("#2a78d6", "#d9730d", "#2e9e5b", "#8a63d2", "#0f9aa8", "#c43d6b")
"""Of bars, which are seen on light and on dark ground."""

_WIDTH = 30
"""Characters of the longest bar in a text."""


class Bar(NamedTuple):
    """What rests in a place.

    Attributes:
        place: its name.
        used: bytes.
        limit: bytes that it has for a model; None if that is not known.
    """

    place: str
    used: float
    limit: int | None

    @property
    def words(self) -> str:
        """Return ``6.6 GiB``, or ``6.6 GiB of 14.7 GiB``."""
        return size(self.used) + (f" of {size(self.limit)}" if self.limit else "")


def size(number: float) -> str:
    """Return bytes in the unit that suits: ``75.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.2f} GiB"


def as_text(rows: Sequence[Row], bars: Sequence[Bar], notes: Sequence[str]) -> str:
    """Return the table, the bars and the notes as lines."""
    lines = [_TITLES, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = (
        f"{name:<{widths[0]}}  {taken:>{widths[1]}}  {device:<{widths[2]}}  {place}"
        for name, taken, device, place in lines
    )
    longest = _longest(bars)
    label = max((len(bar.place) for bar in bars), default=0)
    drawn = []
    for bar in bars:
        full, whole = (round(_WIDTH * share / longest) for share in (bar.used, max(bar.used, bar.limit or 0)))
        drawn.append(f"{bar.place:<{label}}  {'█' * full + '░' * (whole - full):<{_WIDTH}}  {bar.words}")
    return "\n".join((*(line.rstrip() for line in table), "", *drawn, *notes))


def as_html(rows: Sequence[Row], bars: Sequence[Bar], notes: Sequence[str]) -> str:
    """Return them as a table and bars whose colours suit light and dark themes; the place of a row has its bar's."""
    colours = {bar.place: _COLOURS[index % len(_COLOURS)] for index, bar in enumerate(bars)}
    head = "".join(f'<th style="text-align:{_side(at)}">{title}</th>' for at, title in enumerate(_TITLES))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="text-align:{_side(at)}">{_dot(cell, colours) if at == 3 else ""}{escape(cell)}</td>'
            for at, cell in enumerate(_cells(row))
        )
        + "</tr>"
        for row in rows
    )
    longest = _longest(bars)
    drawn = "".join(_html_bar(bar, colours[bar.place], longest) for bar in bars)
    below = "".join(f'<p style="margin:2px 0">{escape(note)}</p>' for note in notes)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div style="overflow-x:auto">{table}<table><tbody>{drawn}</tbody></table>{below}</div>'


def _cells(row: Row) -> tuple[str, str, str, str]:
    name, num, taken, device, place = row
    return name, f"{num} x {size(taken)}" if num > 1 else size(taken), device, place


def _longest(bars: Sequence[Bar]) -> float:
    return max((max(bar.used, bar.limit or 0) for bar in bars), default=0) or 1


def _side(column: int) -> str:
    return "right" if column == 1 else "left"


def _dot(place: str, colours: dict[str, str]) -> str:
    colour = colours.get(place, colours.get("mapped files", ""))
    return f'<span aria-hidden="true" style="color:{colour}">■ </span>'


def _html_bar(bar: Bar, colour: str, longest: float) -> str:
    track, fill = (100 * share / longest for share in (max(bar.used, bar.limit or 0), bar.used))
    return (
        f'<tr><td style="text-align:left">{escape(bar.place)}</td><td style="width:240px">'
        f'<div style="position:relative;height:10px"><div style="position:absolute;height:10px;background:#8884;'
        f'width:{track:.1f}%"></div><div style="position:absolute;height:10px;background:{colour};width:{fill:.1f}%">'
        f'</div></div></td><td style="text-align:left">{bar.words}</td></tr>'
    )
