"""A `View` as HTML: for a widget while it runs, and as it is for a saved notebook.

Where styles are stripped, as on GitHub, what is left is a heading, a plain table and sentences.
"""

from __future__ import annotations

import functools
import math
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from nb_accelerate.display.loss_chart import with_chart
from nb_accelerate.display.strips import legend, strip
from nb_accelerate.display.view import FIGURES
from nb_accelerate.records import draw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.display.view import Row, View

_HINTS = {
    "gpu": "part of the time in which the GPU computed, a moment ago",
    "cpu": "of one core, a moment ago; several threads together make more than 100 %",
}
_EMPTY_TRACK = '<div class="nba-track"></div>'
_GONE = "Last seen at {at}. Since then the kernel has ended, or the page was loaded anew while it ran."
_CURVE = (150, 26)
_FEW_POINTS = 8
_WIDE = 10
"""Between the least and the greatest loss of a curve that is drawn with a logarithmic scale."""

_CAREFUL = ' class="nba-careful"'

_SHEETS = ("style.css", "times.css", "chart.css")

_ONLY_NOW = ' class="nba-only-now"'
"""A table without bars and figures: its last column begins beside the rank."""


@functools.cache
def style() -> str:
    """Return the style sheet, as an element."""
    sheets = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in _SHEETS)
    return f"<style>{''.join(sheets)}</style>"


def render(view: View, *, at: str = "") -> str:
    """Return the panel, without its style sheet and its charts.

    Args:
        view: what to show.
        at: time of day of a panel that is drawn again soon. If that does not happen, since the kernel has ended, say,
            a sentence with it appears: by the style sheet alone, so that it does in a saved notebook too.
    """
    gone = f'<p class="nba-gone">{_GONE.format(at=at)}</p>' if at else ""
    return f'<div class="nba"><div class="nba-inside">{_header(view)}{_body(view)}{gone}</div></div>'


def render_charts(view: View) -> str:
    """Return the charts of what was logged; "" if nothing was."""
    if not view.charts:
        return ""
    return f'<div class="nba nba-charts">{"".join(draw(one.curve, one.earlier) for one in view.charts)}</div>'


def _header(view: View) -> str:
    setup = " · ".join(view.facts.setup)
    rest = "".join(f' <span class="nba-dim">· {escape(part)}</span>' for part in view.summary or view.outlook)
    return (
        f'<header><span role="img" aria-label="{view.state}"{_CAREFUL if view.mark == "!" else ""}>{view.mark}</span> '
        f"<b>{escape(view.facts.name)}</b> "
        f'<span class="nba-dim nba-setup" title="{escape(view.facts.details or setup)}">{escape(setup)}</span> '
        f'<span class="nba-time"><span>{view.elapsed}</span>{rest}</span>{with_chart(view, _curve(view))}</header>'
    )


def _curve(view: View) -> str:
    """Return the curve of the loss; its empty place while there may be one later, so that nothing moves then."""
    points = view.curve
    width, height = _CURVE
    if len(points) < _FEW_POINTS:
        is_on = view.state in ("starting", "running")
        return f'<svg width="{width}" height="{height}" aria-hidden="true"></svg>' if is_on else ""
    (first, _), (last, _) = points[0], points[-1]
    values = [loss for _, loss in points]
    if min(values) > 0 and max(values) > _WIDE * min(values):  # else the first steps would flatten all that follow
        values = [math.log(loss) for loss in values]
    low, high = min(values), max(values)
    across = width / ((last - first) or 1.0)
    down = (height - 4) / ((high - low) or 1.0)
    path = "".join(
        f"{'L' if index else 'M'}{(step - first) * across:.1f},{2 + (high - value) * down:.1f}"
        for index, ((step, _), value) in enumerate(zip(points, values, strict=True))
    )
    label = f"loss from {points[0][1]:.3g} to {points[-1][1]:.3g}"
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f'<title>{label}</title><path d="{path}" fill="none" stroke="#2a78d6"/></svg>'
    )


def _body(view: View) -> str:
    table = _dots(view) + _table((*view.bars, *view.rows), view.columns)
    if view.state == "done" and view.rows:
        rows = _table(view.rows, view.columns)
        folded = f"<details><summary>{escape(' · '.join(view.remarks))}</summary>{rows}</details>"
        table = _table(view.bars) + folded if view.bars else folded
    table += legend(view.times, view.named)
    if view.advice:
        table += f'<p class="nba-advice">{escape(view.advice)}</p>'
    warnings = "".join(f'<p class="nba-warn">{escape(sentence)}</p>' for sentence in view.warnings)
    held = f'<p class="nba-dim">{escape(view.held)}</p>' if view.held else ""
    return table + held + warnings + _failure(view)


def _table(rows: Sequence[Row], standing: Sequence[str] = ()) -> str:
    """Return a table.

    Args:
        rows: of it.
        standing: names of columns that it has also if no row has a value for them.
    """
    if not rows:
        return ""
    columns = [(name, title) for name, title in FIGURES if name in standing or any(getattr(row, name) for row in rows)]
    has_bars = bool(standing) or any(row.share is not None for row in rows)
    head = "".join(f'<th class="nba-{name}"{_hint(name)}>{title}</th>' for name, title in columns)
    bar = '<th class="nba-bar"></th>' if has_bars else ""
    lines = "".join(_row(row, [name for name, _ in columns], has_bar=has_bars) for row in rows)
    return (
        f"<table{'' if has_bars or columns else _ONLY_NOW}><thead>"
        f'<tr><th class="nba-rank">rank</th>{bar}{head}<th class="nba-now">now</th></tr></thead>'
        f"<tbody>{lines}</tbody></table>"
    )


def _hint(name: str) -> str:
    return _title(_HINTS.get(name))


def _row(row: Row, columns: Sequence[str], *, has_bar: bool) -> str:
    hints = {"memory": row.held, "step": row.step}
    texts = {name: escape(getattr(row, name)) for name in columns} | {"step": _step(row)}
    cells = "".join(f'<td class="nba-{name}"{_title(hints.get(name))}>{texts[name]}</td>' for name in columns)
    kind = f' class="nba-{row.kind}"' if row.kind else ""
    return (
        f'<tr{kind}><td class="nba-rank">{row.ranks}</td>{_bar(row) if has_bar else ""}{cells}'
        f'<td class="nba-now"><div title="{escape(row.said)}">{_now(row)}</div></td></tr>'
    )


def _title(text: str | None) -> str:
    return f' title="{escape(text)}"' if text else ""


def _step(row: Row) -> str:
    """Return the step of a row. How many there are is an element: narrow cells, which have the bar, leave it out."""
    step, of, total = row.step.partition(" / ")
    return f'{escape(step)}<span class="nba-total">{of}{escape(total)}</span>' if of else escape(step)


def _now(row: Row) -> str:
    """Return what a row says last. The line of the code is an element: narrow cells leave it out."""
    if not row.place:
        return escape(row.said)
    place = f", {row.place}"
    return f'{escape(row.said.removesuffix(place))}<span class="nba-place">{escape(place)}</span>'


def _bar(row: Row) -> str:
    if row.share is None:
        return f'<td class="nba-bar">{"" if row.step else _EMPTY_TRACK}{strip(row.times, f"rank {row.ranks}")}</td>'
    percent = f"{100 * row.share:.1f}"
    fill = f'<div class="nba-fill" style="width:{percent}%"></div>' if row.share else ""
    return (
        f'<td class="nba-bar"><div class="nba-track" role="progressbar" aria-valuenow="{percent}" aria-valuemin="0" '
        f'aria-valuemax="100" aria-label="rank {row.ranks}">'
        f"{fill}</div>{strip(row.times, f'rank {row.ranks}')}</td>"
    )


def _dots(view: View) -> str:
    if not view.dots:
        return ""
    dots = "".join(
        f'<div class="{" nba-".join(filter(None, ("nba-dot", dot.kind)))}" '
        f'title="rank {dot.rank}: {100 * dot.share:.0f} %">'
        f'<i style="height:{100 * dot.share:.0f}%"></i></div>'
        for dot in view.dots
    )
    return f'<div class="nba-dots" aria-hidden="true">{dots}</div>'


def _failure(view: View) -> str:
    failure = view.failure
    if failure is None or not failure.details:
        return ""
    return f"<details><summary>{escape(failure.label)}</summary><pre>{escape(failure.details)}</pre></details>"
