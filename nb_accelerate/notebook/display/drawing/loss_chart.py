"""The chart behind the small curve of a panel, which opens in place and needs no server and no script.

::

    loss, smoothed, with losses of earlier runs and of validation               one scale, logarithmic if it is wide
    other logged numbers, such as the learning rate                             a low picture each, over the same steps;
                                                                                a constant is said in words

While a run is on its chart is sent with each drawing: it has fewer points, and the smoothed loss alone.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nb_accelerate.base.records import Curve, Line, picture
from nb_accelerate.base.records.curves import SMOOTHED_FROM, is_wide, legend, smoothed
from nb_accelerate.notebook.display.drawing.fold import fold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.base.records import Points
    from nb_accelerate.notebook.display.view import View

_HEIGHT, _LOW_HEIGHT = 186, 58
"""Pixels: heights of the picture of losses and of each below it."""

_MOST_LOW = 4
"""Pictures below the losses, at most."""

_OF_EARLIER = (("#8f8f8f", "2 3"), ("#a58a5c", "7 3"), ("#9a7fa8", "9 3 2 3"))
"""Strokes and dashes of earlier runs."""

_OF_VALIDATION = ("val", "eval", "test", "dev")


def with_chart(view: View, curve: str) -> str:
    """Return the small curve with the chart that opens when it is clicked on; the curve alone if there is none yet."""
    if "<path" not in curve:
        return curve
    is_on = view.state in ("starting", "running")
    chart = draw_losses(view.curve, view.logged, view.before, view.own_settings, is_on=is_on)
    return fold(curve, chart, key=view.key, kind="nba-chart", hint="chart of the loss")


def draw_losses(
    loss: Points,
    logged: Sequence[Curve] = (),
    before: Sequence[Curve] = (),
    own_settings: str = "",
    *,
    is_on: bool = False,
) -> str:
    """Return the chart with its legend, as HTML.

    Args:
        logged: other values by step. Losses of validation share the picture of the loss; a constant is a word.
        before: losses of earlier runs.
        own_settings: by which this run differs from them.
    """
    most = 30 if is_on else 240
    validation = [curve for curve in logged if is_loss_of_validation(curve.name)]
    constant = [curve for curve in logged if len({value for _, value in curve.points}) == 1]
    others = [curve for curve in logged if curve not in (*validation, *constant)][:_MOST_LOW]
    lines = [
        *(
            Line(Curve(curve.name, smoothed(curve.points)), f"before-{index % 3}", *_OF_EARLIER[index % 3])
            for index, curve in enumerate(before)
        ),
        *(Line(curve, "validation", "#b35c00") for curve in validation),
    ]
    own = f", {own_settings}" if own_settings else ""
    if len(loss) < SMOOTHED_FROM:
        lines.append(Line(Curve(f"loss{own}", loss), "loss", "#1f66ba"))
    else:
        if not is_on:
            lines.append(Line(Curve("each step", loss), "raw", "#5796dd"))
        lines.append(Line(Curve(f"loss{own}, smoothed", smoothed(loss)), "loss", "#1f66ba"))
    steps = [step for line in lines for step, _ in line.curve.points]
    span = min(steps), max(steps)
    is_log = is_wide(tuple(point for line in lines for point in line.curve.points))
    title = "loss, logarithmic" if is_log else "loss"
    pictures = [picture(lines, title, height=_HEIGHT, is_log=is_log, has_axis=not others, span=span, most=most)]
    for curve in others:
        line = Line(curve, "low", "#6a4fb0")
        is_last = curve is others[-1]
        pictures.append(
            picture([line], curve.name, height=_LOW_HEIGHT, num_ticks=2, has_axis=is_last, span=span, most=most)
        )
    said = " · ".join(f"{curve.name} {curve.points[-1][1]:.4g}" for curve in constant if curve not in validation)
    words = f'<p class="nba-legend">constant: {escape(said)}</p>' if said else ""
    return f'<div class="nba-big">{legend(lines)}{"".join(pictures)}{words}</div>'


def is_loss_of_validation(name: str) -> bool:
    """Return whether a logged name stands for a loss on validation data: ``val_loss``, ``eval/loss``."""
    parts = name.lower().replace("/", "_").replace("-", "_").replace(".", "_").split("_")
    return "loss" in parts and any(part.startswith(_OF_VALIDATION) for part in parts)
