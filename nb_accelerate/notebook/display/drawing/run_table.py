"""The rows of a sweep as an HTML table, whose first column is the configuration of a run."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.view import Row

_WIDEST = 32
"""Characters of a configuration that its column has room for; the rest is in the hint of the row."""

_FIGURES = ("step", "loss", "lasted")


def run_table(rows: Sequence[Row], runs: Sequence[str]) -> str:
    """Return the table; "" without rows.

    Args:
        rows: of runs that have begun.
        runs: names of all, so that no column moves when a longer name comes.
    """
    if not rows:
        return ""
    width = min(_WIDEST, max(map(len, runs)))
    return (
        '<table class="nba-only-now nba-sweep"><thead>'
        f'<tr><th class="nba-rank nba-run" style="width:calc({width}ch + 14px)">run</th><th class="nba-bar"></th>'
        '<th class="nba-step">step</th><th class="nba-loss">loss</th><th class="nba-lasted">time</th>'
        f'<th class="nba-now">now</th></tr></thead><tbody>{"".join(map(_row, rows))}</tbody></table>'
    )


def _row(row: Row) -> str:
    has_failed = row.kind == "bad" and row.share != 1.0
    kind = f"nba-{row.kind}" if row.kind else ""
    if row.kind == "bad" and not has_failed:
        kind += " nba-runs"  # it is the loss that is bad, not what the run does
    is_finite = row.loss.lstrip("-") not in ("nan", "inf")
    classes = {
        "step": "nba-step",
        "loss": "nba-loss" if is_finite else "nba-loss nba-not-finite",
        "lasted": "nba-lasted",
    }
    figures = "".join(f'<td class="{classes[name]}">{escape(getattr(row, name))}</td>' for name in _FIGURES)
    name, percent = escape(row.ranks), f"{100 * (row.share or 0.0):.1f}"
    fill = f'<div class="nba-fill" style="width:{percent}%"></div>' if row.share else ""
    return (
        f'<tr class="{kind}"><td class="nba-rank nba-run" title="{name}">{name}</td>'
        f'<td class="nba-bar"><div class="nba-track" role="progressbar" aria-valuenow="{percent}" aria-valuemin="0" '
        f'aria-valuemax="100" aria-label="run {name}">{fill}</div></td>'
        f'{figures}<td class="nba-now"><div title="{escape(row.now)}">{escape(row.now)}</div></td></tr>'
    )
