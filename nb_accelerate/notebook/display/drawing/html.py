"""A `View` as HTML: for a widget while it runs, and as it is for a saved notebook.

Where styles are stripped, as on GitHub, what is left is a heading, a plain table and sentences.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from nb_accelerate.base.records import LABELS, Curve, Line, draw, picture, pieces
from nb_accelerate.base.records.curves import SMOOTHED_FROM, is_wide, legend, smoothed
from nb_accelerate.notebook.display.view import FIGURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.base.records import Points
    from nb_accelerate.notebook.display.view import BarLine, Row, View


_HINTS = {"gpu": "part of the time in which the GPU computed, a moment ago"}
_EMPTY_TRACK = '<div class="nba-track"></div>'
# If JupyterLab knows that the kernel has ended, the style sheet says so in place of the second sentence.
_GONE = (
    "No news since {at}.<span> If the kernel runs, call nb_accelerate.attach() in a cell; if not, run this cell again."
    "</span>"
)

_CURVE = (150, 26)
_FEW_POINTS = 8
_MOST_POINTS = 24
_NOT_FINITE = ("nan", "inf")

_SHEETS = ("style.css", "chart.css")

_OF_TOTAL = re.compile(r"^\S+ / (.+)$")

# Characters for which columns have room before totals are known: ``100 / 100``, ``10 / 10``.
_LEAST = {"step": 7.5, "epoch": 5.5}

_OF_EACH = ("loss", "memory", "gpu", "machine")  # figures in which ranks that are in step differ


@functools.cache
def style() -> str:
    """Return the style sheet, as an element."""
    sheets = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in _SHEETS)
    return f'<style class="nba-sheet">{"".join(sheets)}{LABELS}</style>'


def render(view: View, *, at: str = "") -> str:
    """Return the panel, without its style sheet and its charts.

    Args:
        at: time of day of a panel that is drawn again soon. If that does not happen, since the kernel has ended, say,
            a sentence with it appears, and what looks alive goes: by the style sheet alone, so that it does in a saved
            notebook too.
    """
    gone = f'<p class="nba-gone">{_GONE.format(at=at)}</p>' if at else ""
    live = " nba-live" if at else ""
    inside = _header(view) + _body(view) + gone
    script = open_again(view.key) if view.key and "<details" in inside else ""
    return f'<div class="nba"><div class="nba-inside{live}">{inside}{script}</div></div>'


def render_charts(view: View) -> str:
    """Return the charts of what was logged; "" if nothing was."""
    if not view.charts:
        return ""
    return f'<div class="nba nba-charts">{"".join(draw(chart.curve, chart.earlier) for chart in view.charts)}</div>'


def _header(view: View) -> str:
    setup = " · ".join(view.facts.setup)
    mark = "nba-mark nba-careful" if view.mark == "!" else "nba-mark"
    times = _times([view.elapsed, *(view.summary or view.outlook)])
    return (
        f'<header><span role="img" aria-label="{view.state}" class="{mark}">{view.mark}</span> '
        f"<b>{escape(view.facts.name)}</b> "
        f'<span class="nba-dim nba-setup" title="{escape(view.facts.details or setup)}">{escape(setup)}</span> '
        f'<span class="nba-time">{times}</span> {with_chart(view, _curve(view))}</header>'
    )


def _times(parts: Sequence[str]) -> str:
    """Return what a header says after the setup. A dot ends a part, so that none begins a line of a narrow cell."""
    dot = '<span class="nba-dim"> ·</span>'
    return " ".join(
        f"<span{_class('nba-dim' if index else '')}>{escape(part)}{dot if index < len(parts) - 1 else ''}</span>"
        for index, part in enumerate(parts)
    )


def _curve(view: View) -> str:
    """Return the curve of the loss; its empty place while there may be one later, so that nothing moves then."""
    points = view.curve
    width, height = _CURVE
    finite = [loss for _, loss in points if math.isfinite(loss)]
    if len(finite) < _FEW_POINTS:
        is_on = view.state in ("starting", "running")
        return f'<svg width="{width}" height="{height}" aria-hidden="true"></svg>' if is_on else ""
    scale = math.log if is_wide(points) else float
    low, high = scale(min(finite)), scale(max(finite))
    first = points[0][0]
    across = width / ((points[-1][0] - first) or 1.0)
    down = (height - 4) / ((high - low) or 1.0)
    path = ""
    for piece in pieces(points, _MOST_POINTS):
        at = (f"{(step - first) * across:.0f},{2 + (high - scale(loss)) * down:.1f}" for step, loss in piece)
        path += "M" + "L".join(at)
    label = f"loss from {finite[0]:.3g} to {finite[-1]:.3g}"
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f'<title>{label}</title><path d="{path}" fill="none" stroke="#2a78d6"/></svg>'
    )


def _body(view: View) -> str:
    times = f'<p class="nba-dim">{_prose(f"time: {view.times}")}</p>' if view.times else ""
    failed = view.state == "failed"
    key = f"{view.key}-each" if view.key else ""
    each = _each(view)
    if view.state == "done" and view.rows:
        summary = f"ranks: peak {view.peak}" if view.peak else "ranks"
        inside = _table(view.rows, view.columns, kind="nba-groups" if view.each else "") + each + times
        table = fold(summary, inside, key=key, kind="nba-each") + _bars(view.bars)
    else:
        table = _table(view.rows, view.columns, failed=failed, kind="nba-groups" if view.each else "")
        table += (fold("each rank", each, key=key, kind="nba-each") if each else "") + times + _bars(view.bars)
    advice = f'<p class="nba-advice">{_prose(view.advice)}</p>' if view.advice else ""
    warnings = "".join(f'<p class="nba-warn">{_prose(sentence)}</p>' for sentence in view.warnings)
    held = f'<p class="nba-dim">{_prose(view.held)}</p>' if view.held else ""
    notes = "".join(f'<p class="nba-dim">{_prose(line)}</p>' for line in view.notes)
    return table + held + warnings + advice + notes + _failure(view)


def _prose(text: str) -> str:
    """Return text that may have several lines. No line begins with the sign of a percentage."""
    return escape(re.sub(r"(?<=\d) %", "\u00a0%", text))


def _each(view: View) -> str:
    """Return a line for each rank that has no row, with what differs between ranks; "" if there is nothing to say."""
    names = [name for name in _OF_EACH if any(getattr(row, name) for row in view.each)]
    if not names:
        return ""
    head = "\t".join(["rank", *(dict(FIGURES).get(name, name) for name in names)])
    kind = "nba-lines" if any(row.now for row in view.each) else "nba-lines nba-many"
    usual = ("", view.rows[0].said)
    lines = [
        [row.ranks, *(getattr(row, name) for name in names), *([] if row.said in usual else [row.said])]
        for row in view.each
    ]
    said = "\n".join(_prose("\t".join(line)) for line in lines)
    return f'<pre class="{kind}" tabindex="0" aria-label="each rank"><span class="nba-dim">{head}</span>\n{said}</pre>'


def _table(rows: Sequence[Row], standing: Sequence[str] = (), *, failed: bool = False, kind: str = "") -> str:
    if not rows:
        return ""
    columns = [(name, title) for name, title in FIGURES if name in standing or any(getattr(row, name) for row in rows)]
    has_bars = bool(standing) or any(row.share is not None for row in rows)
    widths = {name: _width([getattr(row, name) for row in rows], least) for name, least in _LEAST.items()}
    head = "".join(
        f'<th class="nba-{name}"{widths.get(name, "")}{_title(_HINTS.get(name))}>{title}</th>'
        for name, title in columns
    )
    bar = '<th class="nba-bar"></th>' if has_bars else ""
    hinted = rows if len(rows) > 1 else [replace(row, times="") for row in rows]  # those of all are said below
    lines = "".join(_row(row, [name for name, _ in columns], has_bar=has_bars, failed=failed) for row in hinted)
    return (
        f"<table{_class(kind if has_bars or columns else 'nba-only-now')}><thead>"
        f'<tr><th class="nba-rank">rank</th>{bar}{head}<th class="nba-now">now</th></tr></thead>'
        f"<tbody>{lines}</tbody></table>"
    )


def _row(row: Row, columns: Sequence[str], *, has_bar: bool, failed: bool) -> str:
    texts = {name: escape(getattr(row, name)) for name in columns} | {"step": _step(row)}
    is_finite = row.loss.lstrip("-") not in _NOT_FINITE
    classes = {name: f"nba-{name}" for name in columns}
    if not is_finite:
        classes["loss"] = "nba-loss nba-not-finite"
    cells = "".join(
        f'<td class="{classes[name]}"{_title(row.step if name == "step" else None)}>{texts[name]}</td>'
        for name in columns
    )
    kind = f"nba-{row.kind}" if row.kind else "" if row.step else "nba-first"
    if row.kind == "bad" and not (is_finite or failed or row.now == "failed"):
        kind += " nba-runs"  # it is the loss that is bad, not what the rank does
    bar = _bar(row) if has_bar else ""
    machine = _title(row.machine and f"on {row.machine}")
    return (
        f'<tr{_class(kind)}><td class="nba-rank"{machine}>{row.ranks}</td>{bar}{cells}'
        f'<td class="nba-now"><div title="{escape(row.said)}">{_now(row)}</div></td></tr>'
    )


def _width(texts: Sequence[str], least: float) -> str:
    """Return the width of a column of figures with totals: nothing is to move while they come nearer to these.

    Args:
        least: characters that have room in any case.
    """
    full = [_OF_TOTAL.sub(r"\1 / \1", text) for text in texts]
    digits = max(least, *(sum(1 if one.isdigit() else 0.5 for one in text) for text in full))
    return f' style="width:calc({digits:g}ch + 12px)"'


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""


def _title(text: str | None) -> str:
    return f' title="{escape(text)}"' if text else ""


def _step(row: Row) -> str:
    """Return the step of a row. How many there are is an element: narrow cells, which have the bar, leave it out."""
    step, of, total = row.step.partition(" / ")
    return f'{escape(step)}<span class="nba-total">{of}{escape(total)}</span>' if of else escape(step)


def _now(row: Row) -> str:
    """Return what a row says last. The line of the code is an element: narrow cells leave it out."""
    if not row.location:
        return _prose(row.said)
    location = f", {row.location}"
    return f'{_prose(row.said.removesuffix(location))}<span class="nba-place">{escape(location)}</span>'


def _bar(row: Row) -> str:
    times = _title(f"time: {row.times}" if row.times else None)
    if row.share is None:
        return f'<td class="nba-bar"{times}>{"" if row.step else _EMPTY_TRACK}</td>'
    return f'<td class="nba-bar"{times}>{_track(row.share, f"rank {row.ranks}")}</td>'


def _track(share: float, label: str) -> str:
    percent = f"{100 * share:.1f}"
    fill = f'<div class="nba-fill" style="width:{percent}%"></div>' if share else ""
    return (
        f'<div class="nba-track" role="progressbar" aria-valuenow="{percent}" aria-valuemin="0" aria-valuemax="100" '
        f'aria-label="{escape(label)}">{fill}</div>'
    )


def _bars(bars: Sequence[BarLine]) -> str:
    lines = "".join(
        f"<div{_class(f'nba-{bar.kind}' if bar.kind else '')}>"
        f'<span style="padding-left:{bar.depth}em">{escape(bar.label)}</span> '
        f"<span>{'' if bar.share is None else _track(bar.share, bar.label or 'progress')}</span> "
        f"<span>{escape(bar.text)}</span></div>"
        for bar in bars
    )
    return f'<div class="nba-bars">{lines}</div>' if bars else ""


def _failure(view: View) -> str:
    failure = view.failure
    if failure is None or not failure.details:
        return ""
    return f"<details><summary>{escape(failure.label)}</summary><pre>{escape(failure.details)}</pre></details>"


def fold(summary: str, content: str, *, key: str, kind: str, hint: str = "") -> str:
    """Return what unfolds, as HTML."""
    says = f' title="{hint}" aria-label="{hint}"' if hint else ""
    keeps = f' data-nba="{key}" ontoggle="(window.nbaOpen=window.nbaOpen||{{}})[this.dataset.nba]=this.open"'
    return f'<details class="{kind}"{keeps if key else ""}><summary{says}>{summary}</summary>{content}</details>'


def open_again(key: str) -> str:
    """Return a script, as HTML, that opens the parts of a panel that were open when it was drawn before."""
    return (
        f"<script>document.querySelectorAll('details[data-nba^=\"{key}\"]').forEach("
        "function(d){d.open=!!(window.nbaOpen||{})[d.dataset.nba]})</script>"
    )


_HEIGHT, _LOW_HEIGHT = 186, 58  # pixels: heights of the picture of losses and of each below it

_MOST_LOW = 4  # pictures below the losses, at most

# Strokes and dashes of earlier runs.
_OF_EARLIER = (("#8f8f8f", "2 3"), ("#a58a5c", "7 3"), ("#9a7fa8", "9 3 2 3"))

_OF_VALIDATION = ("val", "eval", "test", "dev")


def with_chart(view: View, curve: str) -> str:
    """Return the small curve with the chart that opens when it is clicked on; the curve alone if there is none yet."""
    if "<path" not in curve:
        return curve
    is_on = view.state in ("starting", "running")
    chart = draw_losses(view.curve, view.logged, view.before, view.run_label, is_on=is_on)
    return fold(curve, chart, key=view.key, kind="nba-chart", hint="chart of the loss")


def draw_losses(
    loss: Points,
    logged: Sequence[Curve] = (),
    before: Sequence[Curve] = (),
    run_label: str = "",
    *,
    is_on: bool = False,
) -> str:
    """Return the chart with its legend, as HTML.

    Args:
        logged: other values by step. Losses of validation share the picture of the loss; a constant is a word.
        before: losses of earlier runs.
        run_label: by which this run differs from them.
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
    own = f", {run_label}" if run_label else ""
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
