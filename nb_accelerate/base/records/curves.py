"""Curves as a small SVG picture: no library, no script, and it survives in a saved notebook. Charts are matplotlib's.

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

# (step, value), in order of steps. Where a value is not finite the curve is interrupted.
Points = tuple[tuple[float, float], ...]

# Pixels: of the picture, on its sides, above the curves, of these, and of the axis.
_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT, _AXIS = 320, 58, 18, 24, 110, 36

_BOTTOM = _TOP + _HEIGHT

_HUGE = 1e300  # values beyond are drawn outside of the picture: differences of such numbers are infinite
_WIDE = 10.0  # between the least and the greatest loss that are drawn with a logarithmic scale

# Style sheet of pictures.
LABELS = (
    ".nba-plot{position:relative}.nba-plot i{position:absolute;font-style:normal;line-height:1;white-space:nowrap}"
    ".nba-plot i::before{content:attr(data-t)}.nba-plot .nba-y{transform:translate(-100%,-50%)}"
    ".nba-plot .nba-x{transform:translate(-50%,0)}"
)


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


def draw(curve: Curve, earlier: Sequence[Curve] = (), *, most: int = 240) -> str:
    """Return a curve as HTML, which needs `LABELS`, with earlier ones drawn faintly behind it on the same scale.

    Args:
        most: points of a curve that are drawn, about.
    """
    finite = [point for one in (*earlier, curve) for point in one.points if math.isfinite(point[1])]
    own = [value for _, value in curve.points if math.isfinite(value)]
    last = escape(f"{curve.name} {own[-1]:.4g}" if own else f"{curve.name} no finite value")
    is_log = is_wide(tuple(finite))
    title = f'<div style="font:12px sans-serif">{last}{", logarithmic" if is_log else ""}</div>'
    if len({value for _, value in finite}) < 2:  # a constant needs no picture
        return title
    across, steps = _scale([step for step, _ in finite], _LEFT, _WIDTH - _RIGHT, 5)
    fit: Callable[[float], float] = math.log10 if is_log else float
    rise, ticks = _scale([fit(value) for _, value in finite], _BOTTOM, _TOP, 3)
    values = [10**tick if is_log else tick for tick in ticks]

    def up(value: float) -> float:
        return rise(fit(value))

    drawn = "".join(_line(pieces(old.points, most), across, up, 'stroke="#8888"') for old in earlier)
    drawn += _line(pieces(curve.points, most), across, up, 'class="nba-c-loss" stroke="#2a78d6"')
    labels: list[tuple[str, float, float, str]] = [("y", _LEFT - 6, up(tick), f"{tick:.4g}") for tick in values]
    labels += [("x", across(tick), _BOTTOM + 7, f"{tick:,g}") for tick in steps]
    labels.append(("x", (_LEFT + _WIDTH - _RIGHT) / 2, _BOTTOM + 22, "step"))
    grid = "".join(f"M{_LEFT} {up(tick):.1f}H{_WIDTH - _RIGHT}" for tick in values)
    texts = "".join(
        f'<i class="nba-{kind}" style="left:{left:.0f}px;top:{top:.1f}px" data-t="{text}"></i>'
        for kind, left, top, text in labels
    )
    return (
        f'<div>{title}<div class="nba-plot" style="font:11px sans-serif">'
        f'<svg width="{_WIDTH}" height="{_BOTTOM + _AXIS}" role="img" aria-label="{last}">'
        f'<path d="{grid}" stroke="#8885"/>{drawn}</svg><div aria-hidden="true">{texts}</div></div></div>'
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


def _line(parts: Sequence[Points], across: Callable[[float], float], up: Callable[[float], float], look: str) -> str:
    """Return the lines of a curve, and circles for points that no line shows because they stand alone."""
    found = []
    for piece in parts:
        at = [(f"{across(step):.1f}", f"{up(value):.1f}") for step, value in piece]
        if len(at) > 1:
            found.append(f'<polyline points="{" ".join(map(",".join, at))}" fill="none" stroke-width="1.6" {look}/>')
        else:
            found.append(f'<circle cx="{at[0][0]}" cy="{at[0][1]}" r="2.6" fill="none" {look}/>')
    return "".join(found)


def _scale(
    values: Sequence[float], begin: float, end: float, num_ticks: int
) -> tuple[Callable[[float], float], list[float]]:
    """Return a way from numbers to pixels, the least one at `begin`, the greatest at `end`, and numbers to label."""
    low, high = max(min(values), -_HUGE), min(max(values), _HUGE)
    if high - low < 1 / _HUGE:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    size = 10 ** math.floor(math.log10((high - low) / num_ticks))
    step = next(factor * size for factor in (1, 2, 5, 10, 20) if (high - low) / (factor * size) <= num_ticks)
    ticks = [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return (lambda value: begin + (value - low) / (high - low) * (end - begin)), ticks
