"""Curves as a small SVG picture: no library, no script, and it survives in a saved notebook.

Some sites drop the tags of a picture and keep its text, of which numbers at axes would be left, one after the other. So
the numbers are attributes of elements over the picture, and the style sheet shows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 320, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 24, 22

LABELS = (
    ".nba-plot{position:relative}.nba-plot i{position:absolute;font-style:normal;line-height:1;white-space:nowrap}"
    ".nba-plot i::before{content:attr(data-t)}.nba-plot .nba-y{transform:translate(-100%,-50%)}"
    ".nba-plot .nba-x{transform:translate(-50%,0)}.nba-plot .nba-e{transform:translate(-100%,0)}"
)
"""Style sheet of labels in an element of class ``nba-plot``."""


@dataclass(frozen=True)
class Curve:
    """One value over steps."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Some curves, each in a picture of its own."""

    title: str
    curves: tuple[Curve, ...]

    def _repr_html_(self) -> str:
        pictures = "".join(f'<div style="display:inline-block">{draw(curve)}</div>' for curve in self.curves)
        style = f"<style>{LABELS}</style>"
        return f"<div>{style}<b>{escape(self.title)}</b><br>{pictures or 'nothing logged yet'}</div>"

    def __repr__(self) -> str:
        last = ", ".join(f"{curve.name}={curve.points[-1][1]:.4g}" for curve in self.curves if curve.points)
        return f"Plot({self.title!r}: {last})"


def label(kind: str, place: str, text: str) -> str:
    """Return an element that shows a text at its place, and has none.

    Args:
        kind: what of it is at the place: "y" the middle of its right side, "x" of its top, "e" its right end, "" its
            left one.
        place: ``left`` and ``top``, as CSS.
        text: to show.
    """
    look = f' class="nba-{kind}"' if kind else ""
    return f'<i{look} style="{place}" data-t="{escape(text)}"></i>'


def draw(curve: Curve, earlier: Sequence[Curve] = ()) -> str:
    """Return a curve as HTML, which needs `LABELS`. Points that are not finite are left out, and interrupt the line.

    Args:
        curve: what is drawn.
        earlier: drawn faintly behind it, on the same scale.
    """
    finite = _finite(curve)
    if not finite:
        return _frame(curve.name, "no finite value", "", "")
    shown = [*finite, *(point for other in earlier for point in _finite(other))]
    left, right = _span([x for x, _ in shown])
    low, high = _span([y for _, y in shown])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - left) / (right - left) * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - (y - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM),
        )

    heights = (low, (low + high) / 2, high)
    labels = [label("y", f"left:{_LEFT - 4}px;top:{place(left, y)[1]:.1f}px", f"{y:.3g}") for y in heights]
    labels += [
        label("x", f"left:{place(x, low)[0]:.1f}px;top:{HEIGHT - 16}px", f"{x:g}")
        for x in sorted({finite[0][0], finite[-1][0]})
    ]
    body = "".join(
        f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{place(left, y)[1]:.1f}" y2="{place(left, y)[1]:.1f}" '
        'stroke="#8884"/>'
        for y in heights
    )
    for other in earlier:
        title = f"<title> {escape(other.name)} </title>"
        for piece in _pieces(other.points):
            body += _line([place(x, y) for x, y in piece], 'stroke="#8888"', title)
    for piece in _pieces(curve.points):
        body += _line([place(x, y) for x, y in piece], 'class="nba-current" stroke="#2a78d6"')
    return _frame(curve.name, f"{finite[-1][1]:.4g}", body, "".join(labels))


def _finite(curve: Curve) -> list[tuple[float, float]]:
    return [(x, y) for x, y in curve.points if math.isfinite(x) and math.isfinite(y)]


def _line(at: list[tuple[float, float]], look: str, title: str = "") -> str:
    if len(at) == 1:
        return f'<circle cx="{at[0][0]:.1f}" cy="{at[0][1]:.1f}" r="2" fill="none" {look}>{title}</circle>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    return f'<polyline points="{path}" fill="none" stroke-width="1.5" {look}>{title}</polyline>'


def _span(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _pieces(points: tuple[tuple[float, float], ...], most: int = 300) -> list[list[tuple[float, float]]]:
    """Return runs of finite points. Of very many, every n-th: a picture has no room for more."""
    every = max(1, len(points) // most)
    pieces: list[list[tuple[float, float]]] = [[]]
    for index, (x, y) in enumerate(points):
        if not (math.isfinite(x) and math.isfinite(y)):
            pieces.append([])
        elif index % every == 0 or index == len(points) - 1:
            pieces[-1].append((x, y))
    return [piece for piece in pieces if piece]


def _frame(name: str, last: str, body: str, labels: str) -> str:
    return (
        f'<div class="nba-plot" style="width:{WIDTH}px;height:{HEIGHT}px;font:10px sans-serif">'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(name)}: {last}">{body}</svg><div aria-hidden="true">'
        f'<i style="left:{_LEFT}px;top:4px;font-size:12px">{escape(name)}</i> '
        f'<i class="nba-e" style="left:{WIDTH - _RIGHT}px;top:6px">{last}</i> {labels}</div></div>'
    )
