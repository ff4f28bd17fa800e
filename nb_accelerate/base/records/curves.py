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

# (step, value), in order of steps. Where a value is not finite the curve is interrupted.
Points = tuple[tuple[float, float], ...]

# Pixels: of the picture where no style sheet makes it wider, on its sides, above the curves, and of the axis.
_WIDTH, _LEFT, _RIGHT, _TOP, _AXIS = 320, 58, 18, 24, 36

# Units of what is plotted, from left to right. They are stretched; texts, widths of lines and heights are not.
_ACROSS = 1000

_HUGE = 1e300  # values beyond are drawn outside of the picture: differences of such numbers are infinite
_WIDE = 10.0  # between the least and the greatest loss that are drawn with a logarithmic scale

SMOOTHED_FROM = 40  # points of a curve from which on it is smoothed

_SMOOTHED_OVER = 0.03  # part of the points of a curve, on both sides of a point, that the smoothed one is a mean of

# Style sheet of pictures.
LABELS = (
    ".nba-plot{position:relative}.nba-plot i{position:absolute;font-style:normal;line-height:1;white-space:nowrap}"
    ".nba-plot i::before{content:attr(data-t)}.nba-plot .nba-y{left:-6px;transform:translate(-100%,-50%)}"
    ".nba-plot .nba-x{transform:translate(-50%,0)}.nba-plot .nba-e{transform:translate(-100%,0)}"
    ".nba-plot svg{width:100%}.nba-legend{display:flex;flex-wrap:wrap;gap:0 14px;margin:2px 0 4px;font:12px sans-serif}"
)


@dataclass(frozen=True)
class Curve:
    """One value over steps."""

    name: str
    points: Points


@dataclass(frozen=True)
class Line:
    """A curve with its look: the class ``nba-c-`` and `kind`, and a colour where no style sheet has one for it."""

    curve: Curve
    kind: str = "loss"
    stroke: str = "#2a78d6"
    dash: str = ""


@dataclass(frozen=True)
class _Scale:
    """A way from numbers to positions in a picture, and the numbers that have a label."""

    position: Callable[[float], float]
    ticks: tuple[float, ...]


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


def draw(curve: Curve, earlier: Sequence[Curve] = ()) -> str:
    """Return a curve as HTML, which needs `LABELS`, with earlier ones drawn faintly behind it on the same scale."""
    values = [value for _, value in curve.points if math.isfinite(value)]
    last = f"{values[-1]:.4g}" if values else "no finite value"
    if len({value for one in (curve, *earlier) for _, value in one.points}) == 1:  # a constant needs no picture
        return f'<div style="font:12px sans-serif">{escape(curve.name)} {last}</div>'
    lines = [*(Line(other, f"before-{index % 3}", "#8888") for index, other in enumerate(earlier)), Line(curve)]
    return (
        f'<div style="width:{_WIDTH}px"><div style="font:12px sans-serif">{escape(curve.name)} {last}</div>'
        f"{picture(lines, '', height=110, num_ticks=3)}</div>"
    )


def picture(
    lines: Sequence[Line],
    title: str,
    *,
    height: int,
    num_ticks: int = 5,
    is_log: bool = False,
    has_axis: bool = True,
    span: tuple[float, float] | None = None,
    most: int = 240,
) -> str:
    """Return curves on one scale, as HTML, which needs `LABELS`; "" if no value is finite.

    Args:
        height: pixels of what is plotted.
        span: first and last step that are drawn; None for those of the curves.
        most: points of a curve that are drawn, about.
    """
    finite = [point for line in lines for point in line.curve.points if math.isfinite(point[1])]
    if not finite:
        return ""
    shown = span or [step for line in lines for step, _ in line.curve.points]
    bottom = _TOP + height
    steps = _scale(shown, 0, _ACROSS, num_ticks=5)
    values = _scale([value for _, value in finite], bottom, _TOP, is_log=is_log, num_ticks=num_ticks)
    levels = [f"{values.position(tick):.1f}" for tick in values.ticks]
    grid = "".join(f"M0 {level}H{_ACROSS}" for level in levels)
    drawn = "".join(_polylines(line, steps, values, most) for line in lines)
    marks = "".join(_marks(line, steps, values) for line in lines)
    labels = [_label("", f"left:0;top:{_TOP - 14}px", title)] if title else []
    labels += [_label("y", f"top:{level}px", f"{tick:.4g}") for tick, level in zip(values.ticks, levels, strict=True)]
    if has_axis:
        labels += [
            _label("x", f"left:{_percent(steps.position(tick))};top:{bottom + 7}px", f"{tick:,g}")
            for tick in steps.ticks
        ]
        labels.append(_label("x", f"left:50%;top:{bottom + 22}px", "step"))
    total = bottom + (_AXIS if has_axis else 0)
    said = "; ".join(f"{line.curve.name} {line.curve.points[-1][1]:.4g}" for line in reversed(lines))
    return (
        f'<div class="nba-plot" style="height:{total}px;margin:0 {_RIGHT}px 0 {_LEFT}px;font:11px sans-serif">'
        f'<svg width="{_WIDTH - _LEFT - _RIGHT}" height="{total}" style="overflow:visible" role="img" '
        f'aria-label="{escape(said)}"><svg viewBox="0 0 {_ACROSS} {total}" preserveAspectRatio="none" '
        f'width="100%" height="{total}" overflow="visible">'
        f'<path d="{grid}" stroke="#8885" vector-effect="non-scaling-stroke"/>{drawn}</svg>{marks}</svg>'
        f'<div aria-hidden="true">{"".join(labels)}</div></div>'
    )


def is_wide(points: Points) -> bool:
    """Return whether values need a logarithmic scale: else the first steps would flatten all that follow."""
    values = [value for _, value in points if math.isfinite(value)]
    return min(values, default=0.0) > 1e-300 and max(values) > _WIDE * min(values)


def smoothed(points: Points) -> Points:
    """Return the mean of a curve around each of its points, as far as it is finite; itself if it has few points."""
    if len(points) < SMOOTHED_FROM:
        return points
    reach = max(1, round(_SMOOTHED_OVER * len(points)))
    means: list[tuple[float, float]] = []
    for _, run in itertools.groupby(points, key=lambda point: math.isfinite(point[1])):
        piece = list(run)
        for index, (step, _) in enumerate(piece):
            near = min(reach, index, len(piece) - 1 - index)  # as many before as after, so that it does not come late
            around = [value for _, value in piece[index - near : index + near + 1]]
            means.append((step, sum(around) / len(around)))
    return tuple(means)


def legend(lines: Sequence[Line]) -> str:
    """Return which line is which, the last one first, as HTML."""
    inside = " ".join(
        f'<span><svg width="22" height="8" aria-hidden="true"><path d="M0 4H22" fill="none" stroke-width="2" '
        f'class="nba-c-{line.kind}" stroke="{line.stroke}" stroke-dasharray="{line.dash or "none"}"/></svg> '
        f"{escape(line.curve.name)}</span>"
        for line in reversed(lines)
    )
    return f'<p class="nba-legend">{inside} </p>'


def pieces(points: Points, most: int) -> list[Points]:
    """Return the pieces of a curve where it is finite. Of very many points every n-th, and the last of each piece."""
    every = max(1, math.ceil(len(points) / most))
    runs = itertools.groupby(points, key=lambda point: math.isfinite(point[1]))
    whole = [tuple(run) for is_finite, run in runs if is_finite]
    return [(*piece[:-1:every], piece[-1]) for piece in whole]


def _polylines(line: Line, steps: _Scale, values: _Scale, most: int) -> str:
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    look = f'class="nba-c-{line.kind}" stroke="{line.stroke}" vector-effect="non-scaling-stroke"'
    at = (
        " ".join(f"{steps.position(step):.0f},{values.position(value):.1f}" for step, value in piece)
        for piece in pieces(line.curve.points, most)
        if len(piece) > 1
    )
    return "".join(f'<polyline points="{piece}" fill="none" stroke-width="1.6"{dash} {look}/>' for piece in at)


def _marks(line: Line, steps: _Scale, values: _Scale) -> str:
    """Return circles, for points that no line shows because they stand alone, and for validations, which are few."""
    points = line.curve.points
    if line.kind != "validation":
        points = tuple(piece[0] for piece in pieces(points, len(points)) if len(piece) == 1)
    return "".join(
        f'<circle cx="{_percent(steps.position(step))}" cy="{values.position(value):.1f}" r="2.6" fill="none" '
        f'class="nba-c-{line.kind}" stroke="{line.stroke}"/>'
        for step, value in points
        if math.isfinite(value)
    )


def _scale(values: Sequence[float], begin: float, end: float, *, is_log: bool = False, num_ticks: int) -> _Scale:
    """Return a scale on which the least value is at `begin` and the greatest at `end`."""
    low, high = max(min(values), -_HUGE), min(max(values), _HUGE)
    if high - low < 1 / _HUGE:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
        is_log = False
    if is_log:
        least, span = math.log(low), math.log(high) - math.log(low)
        ticks = _log_ticks(low, high)
        return _Scale(lambda value: begin + (math.log(max(value, low)) - least) / span * (end - begin), ticks)
    return _Scale(lambda value: begin + (value - low) / (high - low) * (end - begin), _ticks(low, high, num_ticks))


def _ticks(low: float, high: float, number: int) -> tuple[float, ...]:
    size = 10 ** math.floor(math.log10((high - low) / number))
    step = next(factor * size for factor in (1, 2, 5, 10, 20) if (high - low) / (factor * size) <= number)
    return tuple(index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(exponents) <= 3 else (1,)
    ticks = [tick for exponent in exponents for factor in factors if low <= (tick := factor * 10.0**exponent) <= high]
    return tuple(ticks[:: max(1, len(ticks) // 6)])


def _percent(position: float) -> str:
    return f"{100 * position / _ACROSS:.2f}%"


def _label(kind: str, position: str, text: str) -> str:
    """Return an element that shows a text and has none; with "y" its right side is at a position (CSS)."""
    look = f' class="nba-{kind}"' if kind else ""
    return f'<i{look} style="{position}" data-t="{escape(text)}"></i>'
