"""Curves as a small SVG picture: no library, no script, and it survives in a saved notebook.

Some sites drop the tags of a picture and keep its text: the numbers at axes would be left, one after the other. So
the numbers are attributes of elements over the picture, and the style sheet shows them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Points = tuple[tuple[float, float], ...]
"""(step, value), in order of steps. Where a value is not finite the curve is interrupted."""

_LEFT, _RIGHT, _TOP, _AXIS, _HEIGHT = 58, 18, 12, 36, 110
"""Pixels: beside a picture, above and below what is plotted, and the height of that."""

_ACROSS = 1000
"""Units of what is plotted, from left to right. They are stretched; texts, widths of lines and heights are not."""

_HUGE = 1e300
"""Values beyond are drawn outside of the picture: differences of such numbers are infinite."""

_WIDE = 10.0
"""Between the least and the greatest loss that are drawn with a logarithmic scale."""

_DASHES = ("2 3", "7 3", "9 3 2 3")
"""Of the curves of earlier runs."""

LABELS = (
    ".nba-plot{position:relative}.nba-plot i{position:absolute;font-style:normal;line-height:1;white-space:nowrap}"
    ".nba-plot i::before{content:attr(data-t)}.nba-plot .nba-y{left:-6px;transform:translate(-100%,-50%)}"
    ".nba-plot .nba-x{transform:translate(-50%,0)}.nba-plot svg{width:100%}"
    ".nba-legend{display:flex;flex-wrap:wrap;gap:0 14px;margin:2px 0 4px;font:12px sans-serif}"
)
"""Style sheet of pictures."""


@dataclass(frozen=True)
class Curve:
    """One value over steps."""

    name: str
    points: Points


def plotted(curves: Sequence[Curve], title: str, *, log: bool = False) -> Any:
    """Draw curves on the same axes of matplotlib, and return these.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot as plt
    except ModuleNotFoundError as error:
        raise MissingDependencyError("matplotlib", needed_for="a chart of runs") from error
    axes = plt.subplots()[1]
    for curve in curves:
        axes.plot(*zip(*curve.points, strict=True), label=curve.name.lstrip("_"))  # "_" would hide it in the legend
    axes.set(title=title, xlabel="step", yscale="log" if log else "linear")
    axes.legend()
    return axes


def draw(curve: Curve, earlier: Sequence[Curve] = (), *, width: str = "320px", most: int = 240) -> str:
    """Return a curve as HTML, which needs `LABELS`.

    Args:
        curve: what is drawn.
        earlier: drawn faintly behind it, on the same scale.
        width: of the whole, as CSS.
        most: points of a curve that are drawn, about.
    """
    values = [value for _, value in curve.points if math.isfinite(value)]
    said = f"{escape(curve.name)} {f'{values[-1]:.4g}' if values else 'no finite value'}"
    if len({value for one in (curve, *earlier) for _, value in one.points}) == 1:  # a constant needs no picture
        return f'<div style="font:12px sans-serif">{said}</div>'
    names = "".join(
        f' <span><svg width="22" height="8" aria-hidden="true"><path d="M0 4H22" stroke="#888" '
        f'stroke-dasharray="{_DASHES[index % 3]}"/></svg> {escape(one.name)}</span>'
        for index, one in enumerate(earlier)
    )
    legend = f'<p class="nba-legend"><span>{said}</span>{names}</p>'
    return f'<div style="max-width:100%;width:{width}">{legend}{_picture(curve, earlier, most, said)}</div>'


def _picture(curve: Curve, earlier: Sequence[Curve], most: int, said: str) -> str:
    points = [point for one in (curve, *earlier) for point in one.points]
    finite = [value for _, value in points if math.isfinite(value)]
    if not finite:
        return ""
    is_log = is_wide(tuple(points))
    level: Callable[[float], float] = math.log10 if is_log else float
    bottom, total = _TOP + _HEIGHT, _TOP + _HEIGHT + _AXIS
    across, steps = _scale([step for step, _ in points], 0, _ACROSS, 5)
    down, levels = _scale([level(value) for value in finite], bottom, _TOP, 3)

    def drawn(one: Curve, look: str) -> str:
        return "".join(
            '<polyline points="'
            # A point that stands alone is a line of no length, whose ends are round.
            + " ".join(f"{across(step):.0f},{down(level(value)):.1f}" for step, value in (piece[0], *piece))
            + f'" fill="none" vector-effect="non-scaling-stroke" stroke-linecap="round" {look}/>'
            for piece in pieces(one.points, most)
        )

    faint = (drawn(one, f'stroke="#888" stroke-dasharray="{_DASHES[at % 3]}"') for at, one in enumerate(earlier))
    lines = "".join((*faint, drawn(curve, 'class="nba-c-loss" stroke="#2a78d6" stroke-width="1.6"')))
    grid = "".join(f"M0 {down(tick):.1f}H{_ACROSS}" for tick in levels)
    labels = [_label("y", f"top:{down(tick):.1f}px", f"{10**tick if is_log else tick:.4g}") for tick in levels]
    labels += [
        _label("x", f"left:{100 * across(tick) / _ACROSS:.2f}%;top:{bottom + 7}px", f"{tick:,g}") for tick in steps
    ]
    labels.append(_label("x", f"left:50%;top:{bottom + 22}px", "step"))
    return (
        f'<div class="nba-plot" style="height:{total}px;margin:0 {_RIGHT}px 0 {_LEFT}px;font:11px sans-serif">'
        f'<svg viewBox="0 0 {_ACROSS} {total}" preserveAspectRatio="none" height="{total}" overflow="visible" '
        f'role="img" aria-label="{said}">'
        f'<path d="{grid}" stroke="#8885" vector-effect="non-scaling-stroke"/>{lines}</svg>'
        f'<div aria-hidden="true">{"".join(labels)}</div></div>'
    )


def is_wide(points: Points) -> bool:
    """Return whether values need a logarithmic scale: else the first steps would flatten all that follow."""
    values = [value for _, value in points if math.isfinite(value)]
    return min(values, default=0.0) > 1e-300 and max(values) > _WIDE * min(values)


def pieces(points: Points, most: int) -> list[Points]:
    """Return the pieces of a curve where it is finite. Of very many points every n-th, and the last of each piece."""
    every = max(1, math.ceil(len(points) / most))
    runs = itertools.groupby(points, key=lambda point: math.isfinite(point[1]))
    whole = [tuple(run) for is_finite, run in runs if is_finite]
    return [(*piece[:-1:every], piece[-1]) for piece in whole]


def _scale(
    values: Sequence[float], begin: float, end: float, number: int
) -> tuple[Callable[[float], float], tuple[float, ...]]:
    """Return a scale on which the least value is at `begin` and the greatest at `end`, and about so many round ones."""
    low, high = max(min(values), -_HUGE), min(max(values), _HUGE)
    if high - low < 1 / _HUGE:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    size = 10 ** math.floor(math.log10((high - low) / number))
    step = next(factor * size for factor in (1, 2, 5, 10, 20) if (high - low) / (factor * size) <= number)
    ticks = tuple(index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1))
    return lambda value: begin + (value - low) / (high - low) * (end - begin), ticks


def _label(kind: str, position: str, text: str) -> str:
    """Return an element that shows a text and has none: at a position, as CSS, is the middle of its right side or top.

    Args:
        kind: "y" or "x".
    """
    return f'<i class="nba-{kind}" style="{position}" data-t="{escape(text)}"></i>'
