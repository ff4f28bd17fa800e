"""The chart behind the small curve of a panel, which opens in place and needs no server and no script.

::

    loss, smoothed, with that of earlier runs and with losses of validation     one scale, logarithmic if it is wide
    whatever else was logged, such as the learning rate                         a low picture each, over the same steps

Values appear as the browser's own tooltips. A script of one line, where scripts run, keeps the chart open when the
panel is drawn again. While the run is on the chart has fewer points, because it is sent with each drawing.
"""

from __future__ import annotations

import itertools
import math
from html import escape
from typing import TYPE_CHECKING

from nb_accelerate.base.records import Curve, Line, picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.base.records import Points
    from nb_accelerate.notebook.display.view import View

_HEIGHT, _LOW_HEIGHT = 186, 58
"""Pixels: heights of the picture of losses and of each below it."""

_MOST_LOW = 4
"""Pictures below that of the losses."""

_WIDE = 10.0
"""Between the least and the greatest loss that are drawn with a logarithmic scale."""

_SMOOTHED_FROM = 40
"""Points of a curve from which on it is smoothed."""

_SMOOTHED_OVER = 0.03
"""Part of the points of a curve, on both sides of a point, that the smoothed one is a mean of."""

_OF_EARLIER = (("#8f8f8f", "2 3"), ("#a58a5c", "7 3"), ("#9a7fa8", "9 3 2 3"))
"""Strokes and dashes of earlier runs."""

_OF_VALIDATION = ("val", "eval", "test", "dev")


def with_chart(view: View, curve: str) -> str:
    """Return the small curve with the chart that opens when it is clicked on; the curve alone if there is none yet."""
    if "<path" not in curve:
        return curve
    is_on = view.state in ("starting", "running")
    keeps = script = ""
    if view.key:
        opened = f"(window.nbaOpen=window.nbaOpen||{{}})['{view.key}']"
        keeps = f' data-nba="{view.key}" ontoggle="{opened}=this.open"'
        script = (
            f"<script>document.querySelectorAll('details[data-nba=\"{view.key}\"]').forEach("
            f"function(d){{d.open=!!{opened}}})</script>"
        )
    return (
        f'<details class="nba-chart"{keeps}><summary title="chart of the loss" aria-label="chart of the loss">{curve}'
        f"</summary>{draw_losses(view.curve, view.logged, view.before, is_on=is_on)}</details>{script}"
    )


def is_wide(points: Points) -> bool:
    """Return whether values need a logarithmic scale: else the first steps would flatten all that follow."""
    values = [value for _, value in points if math.isfinite(value)]
    return min(values) > 1e-300 and max(values) > _WIDE * min(values)


def draw_losses(
    loss: Points, logged: Sequence[Curve] = (), before: Sequence[Curve] = (), *, is_on: bool = False
) -> str:
    """Return the chart with its legend, as HTML.

    Args:
        logged: other values by step. Losses of validation share the picture of the loss.
    """
    most, num_bands = (80, 12) if is_on else (240, 32)
    validation = [curve for curve in logged if is_loss_of_validation(curve.name)]
    others = [curve for curve in logged if curve not in validation][:_MOST_LOW]
    lines = [
        *(
            Line(Curve(curve.name, smoothed(curve.points)), f"before-{index % 3}", *_OF_EARLIER[index % 3])
            for index, curve in enumerate(before)
        ),
        *(Line(curve, "validation", "#b35c00") for curve in validation),
    ]
    if len(loss) < _SMOOTHED_FROM:
        lines.append(Line(Curve("loss", loss), "loss", "#1f66ba"))
    else:
        lines.append(Line(Curve("each step", loss), "raw", "#5796dd"))
        lines.append(Line(Curve("loss, smoothed", smoothed(loss)), "loss", "#1f66ba"))
    steps = [step for line in lines for step, _ in line.curve.points]
    span = min(steps), max(steps)
    is_log = is_wide(tuple(point for line in lines for point in line.curve.points))
    title = "loss, logarithmic" if is_log else "loss"
    pictures = [
        picture(
            lines, title, height=_HEIGHT, is_log=is_log, has_axis=not others, span=span, most=most, num_bands=num_bands
        )
    ]
    for curve in others:
        line = Line(curve, "low", "#6a4fb0")
        is_last = curve is others[-1]
        pictures.append(
            picture([line], curve.name, height=_LOW_HEIGHT, num_ticks=2, has_axis=is_last, span=span, most=most)
        )
    has_gaps = not all(math.isfinite(value) for _, value in loss)
    return f'<div class="nba-big">{_legend(lines, has_gaps=has_gaps)}{"".join(pictures)}</div>'


def is_loss_of_validation(name: str) -> bool:
    """Return whether a logged name is that of a loss on data that is not trained with: ``val_loss``, ``eval/loss``."""
    parts = name.lower().replace("/", "_").replace("-", "_").replace(".", "_").split("_")
    return "loss" in parts and any(part.startswith(_OF_VALIDATION) for part in parts)


def smoothed(points: Points) -> Points:
    """Return the mean of a curve around each of its points, as far as it is finite; itself if it has few points."""
    if len(points) < _SMOOTHED_FROM:
        return points
    reach = max(1, round(_SMOOTHED_OVER * len(points)))
    found: list[tuple[float, float]] = []
    for _, run in itertools.groupby(points, key=lambda point: math.isfinite(point[1])):
        piece = list(run)
        for index, (step, _) in enumerate(piece):
            near = min(reach, index, len(piece) - 1 - index)  # as many before as after, so that it does not come late
            around = [value for _, value in piece[index - near : index + near + 1]]
            found.append((step, sum(around) / len(around)))
    return tuple(found)


def _legend(lines: Sequence[Line], *, has_gaps: bool) -> str:
    inside = " ".join(
        f'<span><svg width="22" height="8" aria-hidden="true"><path d="M0 4H22" fill="none" stroke-width="2" '
        f'class="nba-c-{line.kind}" stroke="{line.stroke}" stroke-dasharray="{line.dash or "none"}"/></svg> '
        f"{escape(line.curve.name)}</span>"
        for line in reversed(lines)
    )
    gap = (
        '<span><svg width="22" height="8" aria-hidden="true"><rect class="nba-c-gap" width="22" height="8" '
        'fill="#c22f2f" opacity="0.2"/></svg> not finite</span>'
        if has_gaps
        else ""
    )
    return f'<p class="nba-legend">{inside} {gap}</p>'
