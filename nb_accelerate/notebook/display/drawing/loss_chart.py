"""The chart behind the small curve of a panel: an SVG picture that opens in place and needs no server and no script.

::

    loss, smoothed, with that of earlier runs and with losses of validation     one scale, logarithmic if it is wide
    whatever else was logged, such as the learning rate                         a low picture each, over the same steps

Values appear as the browser's own tooltips. A script of one line, where scripts run, keeps the chart open when the
panel is drawn again. All numbers are attributes, see `base.records.curves`.

While the run is on the chart has fewer points, because it is sent with each drawing.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from html import escape
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from nb_accelerate.base.records import label
from nb_accelerate.notebook.display import words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.base.records import Curve
    from nb_accelerate.notebook.display.view import View

Points = tuple[tuple[float, float], ...]
Gaps = tuple[tuple[float, float], ...]
T = TypeVar("T")

_WIDTH, _LEFT, _RIGHT = 640, 58, 18
"""Pixels: of the picture where no style sheet makes it as wide as the cell, and on both sides of what is plotted."""

_ACROSS = 1000
"""Units of what is plotted, from left to right. They are stretched; texts, widths of lines and heights are not."""

_HEIGHT, _LOW_HEIGHT, _GAP, _BOTTOM = 200, 62, 26, 22
"""Pixels: heights of the chart of losses and of each below it, what is between them, and the axis."""

_MOST_LOW = 4
"""Charts below that of the losses."""

_MOST_POINTS, _MOST_BANDS = 240, 32
"""Points of a line, and places along the axis with a tooltip."""

_MOST_POINTS_NOW, _MOST_BANDS_NOW = 80, 12
"""The same while the run is on."""

_LEAST_BAND = 4
"""Width of the band where the loss was not finite, at least, in units across."""

_WIDE = 10.0
"""Between the least and the greatest loss that are drawn with a logarithmic scale."""

_HUGE = 1e300
"""Values beyond are drawn outside of the chart: differences of such numbers are infinite."""

_SMOOTHED_FROM = 40
"""Points of a curve from which on it is smoothed."""

_SMOOTHED_OVER = 0.05
"""Part of the points of a curve that the smoothed one is a mean of, more or less."""

_OF_EARLIER = (("#8f8f8f", "2 3"), ("#a58a5c", "7 3"), ("#9a7fa8", "9 3 2 3"))
"""Strokes and dashes of earlier runs."""

_OF_VALIDATION = ("val", "eval", "test", "dev")


@dataclass(frozen=True)
class _Line:
    """A line in a chart: what it shows, and how it looks (``nba-c-`` and this is the class of the style sheet).

    It is interrupted before the points of the indices `breaks`.
    """

    name: str
    points: Points
    look: str
    stroke: str
    dash: str = ""
    breaks: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Scale:
    """Numbers to places: `place` of one, and `ticks` that have a label."""

    place: Callable[[float], float]
    ticks: tuple[float, ...]


def with_chart(view: View, curve: str) -> str:
    """Return the small curve with the chart that opens when it is clicked on; the curve alone if there is none yet."""
    if len(view.curve) < 2 or not curve.endswith("</svg>") or "<path" not in curve:
        return curve
    is_on = view.state in ("starting", "running")
    key = escape(view.key)
    keeps = (
        f' data-nba="{key}" ontoggle="(window.nbaOpen=window.nbaOpen||{{}})[\'{key}\']=this.open"' if view.key else ""
    )
    script = (
        f"<script>document.querySelectorAll('details[data-nba=\"{key}\"]').forEach("
        f"function(d){{d.open=!!(window.nbaOpen||{{}})['{key}']}})</script>"
        if view.key
        else ""
    )
    return (
        f'<details class="nba-chart"{keeps}><summary title="chart of the loss" aria-label="chart of the loss">{curve}'
        f"</summary>{draw_losses(view.curve, view.logged, view.before, view.gaps, is_on=is_on)}</details>{script}"
    )


def breaks(points: Points, gaps: Gaps) -> list[int]:
    """Return the indices of the points before which a curve is interrupted.

    Args:
        gaps: (first, last) steps at which it has no value; infinity for a last one to come.
    """
    middles = (first + (min(last, _HUGE) - first) / 2 for first, last in gaps)
    found = {bisect.bisect_right(points, middle, key=itemgetter(0)) for middle in middles}
    return sorted(index for index in found if 0 < index < len(points))


def pieces(points: Sequence[T], at: Sequence[int], most: int) -> list[list[T]]:
    """Return the pieces of a line that is interrupted before these indices, of about so many of its points in all."""
    every = max(1, math.ceil(len(points) / most))
    ends = itertools.pairwise([0, *at, len(points)])
    return [[*points[begin : end - 1 : every], points[end - 1]] for begin, end in ends]


def draw_losses(
    loss: Points, logged: Sequence[Curve] = (), before: Sequence[Curve] = (), gaps: Gaps = (), *, is_on: bool = False
) -> str:
    """Return the chart with its legend, as HTML.

    Args:
        loss: (step, mean loss of the ranks), in order.
        logged: other values by step. Losses of validation share the chart of the loss.
        gaps: (first, last) steps at which the loss was not finite; infinity for now.
        is_on: the run is on, so that the chart is drawn again soon.
    """
    most = _MOST_POINTS_NOW if is_on else _MOST_POINTS
    beside = [curve for curve in logged if is_loss_of_validation(curve.name)]
    low = [curve for curve in logged if curve not in beside][:_MOST_LOW]
    lines = [
        *(
            _Line(curve.name, _calm(curve.points), f"before-{index % 3}", *_OF_EARLIER[index % 3])
            for index, curve in enumerate(before)
        ),
        *_of_run(loss, breaks(loss, gaps)),
        *(_Line(curve.name, curve.points, "validation", "#b35c00") for curve in beside),
    ]
    steps = _scale([step for line in lines for step, _ in line.points], 0, _ACROSS, is_log=False)
    losses = [value for line in lines for _, value in line.points]
    is_log = min(losses) > 1 / _HUGE and max(losses) > _WIDE * min(losses)
    scale = _scale(losses, _HEIGHT, 14, is_log=is_log)
    body = _chart(lines, steps, scale, most)
    labels = _labels(scale, "loss, logarithmic" if is_log else "loss", 0)
    bottom = _HEIGHT
    for curve in low:
        top, bottom = bottom + _GAP, bottom + _GAP + _LOW_HEIGHT
        values = _scale([value for _, value in curve.points], bottom, top + 4, is_log=False, num_ticks=2)
        body += _chart([_Line(curve.name, curve.points, "low", "#6a4fb0")], steps, values, most)
        labels += _labels(values, curve.name, top - 14)
    body += "".join(_not_finite(gap, loss, steps, bottom) for gap in gaps)
    labels += _axis(steps, bottom)
    named = [*lines, *(_Line(one.name, one.points, "", "") for one in low)]
    bands = _bands(named, steps, bottom, _MOST_BANDS_NOW if is_on else _MOST_BANDS)
    height = bottom + _BOTTOM + 14
    said = (
        f"loss from {words.measured(loss[0][1])} to {words.measured(loss[-1][1])} in {words.count(loss[-1][0])} steps"
    )
    return (
        f'<div class="nba-big">{_legend(lines, has_gaps=bool(gaps))}<div class="nba-plot" style="height:{height}px;'
        f'margin-left:{_LEFT}px;font-size:11px"><svg width="{_WIDTH - _LEFT - _RIGHT}" height="{height}" '
        f'style="overflow:visible" role="img" aria-label="{said}">{body}</svg>'
        f'<div aria-hidden="true">{labels}{bands}</div></div></div>'
    )


def is_loss_of_validation(name: str) -> bool:
    """Return whether a logged name is that of a loss on data that is not trained with: ``val_loss``, ``eval/loss``."""
    parts = name.lower().replace("/", "_").replace("-", "_").replace(".", "_").split("_")
    return "loss" in parts and any(part.startswith(_OF_VALIDATION) for part in parts)


def smoothed(points: Points) -> Points:
    """Return the exponential moving mean of a curve, taken from both sides, so that it does not come late."""
    decay = 1 - 2 / (max(2.0, _SMOOTHED_OVER * len(points)) + 1)
    values = [value for _, value in points]
    before, after = _sums(values, decay), _sums(values[::-1], decay)[::-1]
    return tuple(
        (step, (left + right - value) / (weight_left + weight_right - 1))
        for (step, value), (left, weight_left), (right, weight_right) in zip(points, before, after, strict=True)
    )


def _sums(values: Sequence[float], decay: float) -> list[tuple[float, float]]:
    """Return for each value the weighted sum of those until then, and the sum of their weights."""
    total = weight = 0.0
    found = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        found.append((total, weight))
    return found


def _of_run(loss: Points, at: Sequence[int]) -> list[_Line]:
    if len(loss) < _SMOOTHED_FROM:
        return [_Line("loss", loss, "loss", "#1f66ba", breaks=tuple(at))]
    edges = itertools.pairwise([0, *at, len(loss)])
    calm = tuple(point for begin, end in edges for point in smoothed(loss[begin:end]))
    return [
        _Line("each step", loss, "raw", "#5796dd", breaks=tuple(at)),
        _Line("loss, smoothed", calm, "loss", "#1f66ba", breaks=tuple(at)),
    ]


def _calm(points: Points) -> Points:
    """Return a curve of an earlier run, smoothed as that of the run itself is."""
    return points if len(points) < _SMOOTHED_FROM else smoothed(points)


def _scale(values: Sequence[float], begin: float, end: float, *, is_log: bool, num_ticks: int = 5) -> _Scale:
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
    """Return about so many round numbers between two."""
    size = 10 ** math.floor(math.log10((high - low) / number))
    step = next(factor * size for factor in (1, 2, 5, 10, 20) if (high - low) / (factor * size) <= number)
    first = math.ceil(low / step)
    return tuple(index * step for index in range(first, math.floor(high / step) + 1))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(exponents) <= 3 else (1,)
    found = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    found = [one for one in found if low <= one <= high]
    return tuple(found[:: max(1, len(found) // 6)])


def _labels(values: _Scale, title: str, top: float) -> str:
    ticks = "".join(label("y", f"left:-6px;top:{values.place(tick):.1f}px", f"{tick:.4g}") for tick in values.ticks)
    return ticks + label("", f"left:0;top:{top + 1}px", title)


def _chart(lines: Sequence[_Line], steps: _Scale, values: _Scale, most: int) -> str:
    grid = "".join(
        f'<line x1="0" x2="100%" y1="{values.place(tick):.1f}" y2="{values.place(tick):.1f}" stroke="#8885"/>'
        for tick in values.ticks
    )
    drawn = "".join(_drawn(line, steps, values, most) for line in lines)
    marks = "".join(_marks(line, steps, values) for line in lines)
    return (
        f'{grid}<svg class="nba-lines" viewBox="0 0 {_ACROSS} {_HEIGHT}" preserveAspectRatio="none" '
        f'width="100%" height="{_HEIGHT}" overflow="visible">{drawn}</svg>{marks}'
    )


def _drawn(line: _Line, steps: _Scale, values: _Scale, most: int) -> str:
    at = [f"{steps.place(step):.0f},{values.place(value):.1f}" for step, value in line.points]
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    look = f'class="nba-c-{line.look}" stroke="{line.stroke}" vector-effect="non-scaling-stroke"'
    return "".join(
        f'<polyline points="{" ".join(piece)}" fill="none" stroke-width="1.6"{dash} {look}/>'
        for piece in pieces(at, line.breaks, most)
        if len(piece) > 1
    )


def _marks(line: _Line, steps: _Scale, values: _Scale) -> str:
    """Return circles, for the points of a line that is short or has few."""
    if len(line.points) > 1 and line.look != "validation":
        return ""
    return "".join(
        f'<circle cx="{_percent(steps.place(step))}" cy="{values.place(value):.1f}" r="2.6" fill="none" '
        f'class="nba-c-{line.look}" stroke="{line.stroke}"/>'
        for step, value in line.points
    )


def _percent(place: float) -> str:
    return f"{100 * place / _ACROSS:.2f}%"


def _axis(steps: _Scale, bottom: float) -> str:
    ticks = (
        label("x", f"left:{_percent(steps.place(tick))};top:{bottom + 7}px", words.count(tick)) for tick in steps.ticks
    )
    return "".join(ticks) + label("x", f"left:50%;top:{bottom + 22}px", "step")


def _not_finite(gap: tuple[float, float], loss: Points, steps: _Scale, bottom: float) -> str:
    """Return a band where the loss was not finite; at the end of the loss that is known, if it is so now."""
    last = loss[-1][0]
    begin, end = (steps.place(min(max(step, loss[0][0]), last)) for step in gap)
    begin, end = min(begin, _ACROSS - _LEAST_BAND), max(end, begin + _LEAST_BAND)
    return (
        f'<rect class="nba-c-gap" x="{_percent(begin)}" y="0" width="{_percent(min(end, _ACROSS) - begin)}" '
        f'height="{bottom}" fill="#c22f2f" opacity="0.2"/>'
    )


def _bands(lines: Sequence[_Line], steps: _Scale, bottom: float, most: int) -> str:
    """Return invisible bands, each with a tooltip that has the values there."""
    every = sorted({step for line in lines if line.look in ("loss", "validation") for step, _ in line.points})
    chosen = every[:: math.ceil(len(every) / most)]
    places = [steps.place(step) for step in chosen]
    edges = [0, *((a + b) / 2 for a, b in itertools.pairwise(places)), _ACROSS]
    bands = "".join(
        f'<i style="width:{_percent(right - left)}" title="{escape(_values_at(lines, step))}"></i>'
        for step, left, right in zip(chosen, edges[:-1], edges[1:], strict=True)
    )
    return f'<div class="nba-bands" style="height:{bottom}px">{bands}</div>'


def _values_at(lines: Sequence[_Line], step: float) -> str:
    said = [f"step {words.count(step)}"]
    for line in lines:
        if line.look == "raw":
            continue
        until = bisect.bisect_right(line.points, step, key=itemgetter(0))
        if until:
            said.append(f"{line.name} {words.measured(line.points[until - 1][1])}")
    return "; ".join(said)


def _legend(lines: Sequence[_Line], *, has_gaps: bool) -> str:
    inside = " ".join(
        f'<span><svg width="22" height="8" aria-hidden="true"><path d="M0 4H22" fill="none" stroke-width="2" '
        f'class="nba-c-{line.look}" stroke="{line.stroke}" stroke-dasharray="{line.dash or "none"}"/></svg> '
        f"{escape(line.name)}</span>"
        for line in reversed(lines)
    )
    gap = (
        '<span><svg width="22" height="8" aria-hidden="true"><rect class="nba-c-gap" width="22" height="8" '
        'fill="#c22f2f" opacity="0.2"/></svg> not finite</span>'
        if has_gaps
        else ""
    )
    return f'<p class="nba-legend">{inside} {gap}</p>'
