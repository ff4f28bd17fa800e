"""Curves as a small SVG picture: no library, no script, and it survives in a saved notebook."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 320, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 24, 22


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
        return f"<div><b>{escape(self.title)}</b><br>{pictures or 'nothing logged yet'}</div>"

    def __repr__(self) -> str:
        last = ", ".join(f"{curve.name}={curve.points[-1][1]:.4g}" for curve in self.curves if curve.points)
        return f"Plot({self.title!r}: {last})"


def draw(curve: Curve, earlier: Sequence[Curve] = ()) -> str:
    """Return a curve as SVG. Points that are not finite are left out, and interrupt the line.

    Args:
        curve: what is drawn.
        earlier: drawn faintly behind it, on the same scale.
    """
    finite = _finite(curve)
    if not finite:
        return _frame(curve.name, "no finite value", "")
    shown = [*finite, *(point for other in earlier for point in _finite(other))]
    left, right = _span([x for x, _ in shown])
    low, high = _span([y for _, y in shown])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - left) / (right - left) * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - (y - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM),
        )

    body = "".join(
        f'<text x="{_LEFT - 4}" y="{place(left, y)[1] + 3:.1f}" text-anchor="end">{y:.3g}</text>'
        f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{place(left, y)[1]:.1f}" y2="{place(left, y)[1]:.1f}" '
        'stroke="#8884"/>'
        for y in (low, (low + high) / 2, high)
    )
    body += "".join(
        f'<text x="{place(x, low)[0]:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{x:g}</text>'
        for x in sorted({finite[0][0], finite[-1][0]})
    )
    for other in earlier:
        title = f"<title>{escape(other.name)}</title>"
        for piece in _pieces(other.points):
            body += _line([place(x, y) for x, y in piece], 'stroke="#8888"', title)
    for piece in _pieces(curve.points):
        body += _line([place(x, y) for x, y in piece], 'class="nba-current" stroke="#2a78d6"')
    return _frame(curve.name, f"{finite[-1][1]:.4g}", body)


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


def _frame(name: str, last: str, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="10" fill="currentColor" role="img" aria-label="{escape(name)}: {last}">'
        f'<text x="{_LEFT}" y="14" font-size="12">{escape(name)}</text>'
        f'<text x="{WIDTH - _RIGHT}" y="14" text-anchor="end">{last}</text>{body}</svg>'
    )
