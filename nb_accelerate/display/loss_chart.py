"""The chart behind the small curve of a panel: an SVG picture that opens in place and needs no server and no script.

::

    loss, smoothed, with that of earlier runs and with losses of validation     one scale, logarithmic if it is wide
    whatever else was logged, such as the learning rate                         a low picture each, over the same steps

Values appear as the browser's own tooltips. A script of one line, where scripts run, keeps the chart open when the
panel is drawn again.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from html import escape
from operator import itemgetter
from typing import TYPE_CHECKING

from nb_accelerate.display import words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nb_accelerate.display.view import View
    from nb_accelerate.records import Curve

Points = tuple[tuple[float, float], ...]

_WIDTH, _LEFT, _RIGHT = 640, 58, 10
_HEIGHT, _LOW_HEIGHT, _GAP, _BOTTOM = 200, 62, 26, 22
"""Units of the picture: heights of the chart of losses and of each below it, what is between them, and the axis."""

_MOST_LOW = 4
"""Charts below that of the losses."""

_MOST_BANDS = 32
"""Places along the axis with a tooltip."""

_WIDE = 10.0
"""Between the least and the greatest loss that are drawn with a logarithmic scale."""

_HUGE = 1e300
"""Values beyond are drawn outside of the chart: differences of such numbers are infinite."""

_SMOOTHED_FROM = 40
"""Points of a curve from which on it is smoothed."""

_SMOOTHED_OVER = 0.05
"""Part of the points of a curve that the smoothed one is a mean of, more or less."""

_OF_VALIDATION = ("val", "eval", "test", "dev")


@dataclass(frozen=True)
class _Line:
    """A line in a chart: what it shows, and how it looks (``nba-c-`` and this is the class of the style sheet)."""

    name: str
    points: Points
    look: str
    stroke: str
    dash: str = ""


@dataclass(frozen=True)
class _Scale:
    """Numbers to places: `place` of one, and `ticks` that have a label."""

    place: Callable[[float], float]
    ticks: tuple[float, ...]


def with_chart(view: View, curve: str) -> str:
    """Return the small curve with the chart that opens when it is clicked on; the curve alone if there is none yet."""
    if len(view.curve) < 2 or not curve.endswith("</svg>") or "<path" not in curve:
        return curve
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
        f"</summary>{draw_losses(view.curve, view.logged, view.before)}</details>{script}"
    )


def draw_losses(loss: Points, logged: Sequence[Curve] = (), before: Sequence[Curve] = ()) -> str:
    """Return the chart with its legend, as HTML.

    Args:
        loss: (step, mean loss of the ranks), in order.
        logged: other values by step. Losses of validation share the chart of the loss.
        before: losses of earlier runs.
    """
    beside = [curve for curve in logged if is_loss_of_validation(curve.name)]
    low = [curve for curve in logged if curve not in beside][:_MOST_LOW]
    lines = [
        *(
            _Line(curve.name, curve.points, f"before-{index}", "#8a8a8a", ("2 3", "6 3", "1 4")[index % 3])
            for index, curve in enumerate(before)
        ),
        *_of_run(loss),
        *(_Line(curve.name, curve.points, "validation", "#b35c00") for curve in beside),
    ]
    steps = _scale([step for line in lines for step, _ in line.points], _LEFT, _WIDTH - _RIGHT, is_log=False)
    losses = [value for line in lines for _, value in line.points]
    is_log = min(losses) > 1 / _HUGE and max(losses) > _WIDE * min(losses)
    body = _chart(
        lines, steps, _scale(losses, _HEIGHT, 14, is_log=is_log), "loss, logarithmic" if is_log else "loss", 0
    )
    bottom = _HEIGHT
    for curve in low:
        top, bottom = bottom + _GAP, bottom + _GAP + _LOW_HEIGHT
        values = _scale([value for _, value in curve.points], bottom, top + 4, is_log=False, num_ticks=2)
        body += _chart([_Line(curve.name, curve.points, "low", "#6a4fb0")], steps, values, curve.name, top - 14)
    body += _axis(steps, bottom) + _bands(
        [*lines, *(_Line(one.name, one.points, "", "") for one in low)], steps, bottom
    )
    label = (
        f"loss from {words.measured(loss[0][1])} to {words.measured(loss[-1][1])} in {words.count(loss[-1][0])} steps"
    )
    return (
        f'<div class="nba-big">{_legend(lines)}<svg viewBox="0 0 {_WIDTH} {bottom + _BOTTOM + 14}" width="{_WIDTH}" '
        f'role="img" aria-label="{label}" font-size="11" fill="currentColor">{body}</svg></div>'
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


def _of_run(loss: Points) -> list[_Line]:
    if len(loss) < _SMOOTHED_FROM:
        return [_Line("loss", loss, "loss", "#2a78d6")]
    return [
        _Line("loss, as it was", loss, "raw", "#9dc0ea"),
        _Line("loss, smoothed", smoothed(loss), "loss", "#2a78d6"),
    ]


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


def _chart(lines: Iterable[_Line], steps: _Scale, values: _Scale, title: str, top: float) -> str:
    grid = "".join(
        f'<path d="M{_LEFT} {values.place(tick):.1f}H{_WIDTH - _RIGHT}" stroke="#8885"/>'
        f'<text x="{_LEFT - 6}" y="{values.place(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>'
        for tick in values.ticks
    )
    title = f'<text x="{_LEFT}" y="{top + 10}">{escape(title)}</text>'
    return grid + title + "".join(_drawn(line, steps, values) for line in lines)


def _drawn(line: _Line, steps: _Scale, values: _Scale) -> str:
    at = [(steps.place(step), values.place(value)) for step, value in line.points]
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    look = f'class="nba-c-{line.look}" stroke="{line.stroke}"'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    drawn = f'<polyline points="{path}" fill="none" stroke-width="1.6"{dash} {look}/>' if len(at) > 1 else ""
    if len(at) == 1 or line.look == "validation":
        drawn += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="none" {look}/>' for x, y in at)
    return drawn


def _axis(steps: _Scale, bottom: float) -> str:
    labels = "".join(
        f'<text x="{steps.place(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{words.count(tick)}</text>'
        for tick in steps.ticks
    )
    return f'{labels}<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{bottom + 31}" text-anchor="middle">step</text>'


def _bands(lines: Sequence[_Line], steps: _Scale, bottom: float) -> str:
    """Return invisible bands, each with a tooltip that has the values there."""
    every = sorted({step for line in lines if line.look in ("loss", "validation") for step, _ in line.points})
    chosen = every[:: math.ceil(len(every) / _MOST_BANDS)]
    places = [steps.place(step) for step in chosen]
    edges = [_LEFT, *((a + b) / 2 for a, b in itertools.pairwise(places)), _WIDTH - _RIGHT]
    return "".join(
        f'<rect class="nba-c-band" x="{left:.1f}" y="0" width="{right - left:.1f}" height="{bottom}" '
        f'fill="transparent"><title>{escape(_values_at(lines, step))}</title></rect>'
        for step, left, right in zip(chosen, edges[:-1], edges[1:], strict=True)
    )


def _values_at(lines: Sequence[_Line], step: float) -> str:
    said = [f"step {words.count(step)}"]
    for line in lines:
        if line.look == "raw":
            continue
        until = bisect.bisect_right(line.points, step, key=itemgetter(0))
        if until:
            said.append(f"{line.name} {words.measured(line.points[until - 1][1])}")
    return "\n".join(said)


def _legend(lines: Sequence[_Line]) -> str:
    inside = " ".join(
        f'<span><svg width="22" height="8" aria-hidden="true"><path d="M0 4H22" fill="none" stroke-width="2" '
        f'class="nba-c-{line.look}" stroke="{line.stroke}" stroke-dasharray="{line.dash or "none"}"/></svg> '
        f"{escape(line.name)}</span>"
        for line in reversed(lines)
    )
    return f'<p class="nba-legend">{inside}</p>'
