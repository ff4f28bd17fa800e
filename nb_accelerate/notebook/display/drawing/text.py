"""A `View` as text: a line for a log, a table for a terminal and for readers without HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.notebook.display.view import FIGURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.view import Row, View

_COLUMNS = (("ranks", "rank"), *FIGURES, ("said", "now"))
_WIDTH = 12
"""Characters of a progress bar in a terminal."""


def line(view: View) -> str:
    """Return a view as one line of a log; at the end with lines that say where the time went."""
    if view.state not in ("starting", "running"):
        ends = ", ".join([f"{view.facts.name}: {view.state} in {view.elapsed}", *view.summary])
        return "\n".join([ends, *_times(view)])
    parts = [f"{view.facts.name}: {view.elapsed}"]
    middle = _middle(view.rows)
    if middle is not None and middle.step:
        share = "" if middle.share is None else f" ({100 * middle.share:.0f} %)"
        # With the number of epochs, the step is that of the whole run.
        epoch = f"{',' if '/' in middle.epoch else ' of'} epoch {middle.epoch}" if middle.epoch else ""
        parts.append(f"step {middle.step.replace(' ', '')}{share}{epoch}")
        parts += [f"{middle.rate} it/s"] if middle.rate not in ("", "-") else []
        parts += [f"loss {middle.loss}"] if middle.loss else []
    for bar in view.bars[:2]:
        parts.append(f"{bar.label} {bar.step.replace(' ', '')}".lstrip())
    return ", ".join([*parts, *view.outlook])


def table(view: View, *, bars: bool = False) -> str:
    """Return the whole panel, in lines."""
    head = f"{view.mark} {view.facts.name} · {' · '.join(view.facts.setup)}"
    time = " · ".join((view.elapsed, *(view.summary or view.outlook)))
    rows = (*view.bars, *view.rows)
    cells = [[getattr(row, name) for name, _ in _COLUMNS] for row in rows]
    used = [index for index in range(len(_COLUMNS)) if any(line[index] for line in cells)]
    titles = [title for _, title in _COLUMNS]
    if bars and any(row.share is not None for row in rows):
        titles.insert(1, "")
        for row, line in zip(rows, cells, strict=True):
            line.insert(1, _bar(row))
        used = [0, 1, *(index + 1 for index in used if index)]
    lines = [f"{head} · {time}", *_aligned([titles, *cells], used)]
    return "\n".join([*lines, *([view.held] if view.held else []), *view.warnings, *_times(view)])


def _times(view: View) -> list[str]:
    """Return where the time of a run that has ended went, and advice."""
    if view.state in ("starting", "running"):
        return []
    return [*([f"time: {view.times}"] if view.times else []), *([view.advice] if view.advice else [])]


def _bar(row: Row) -> str:
    full = round(_WIDTH * (row.share or 0.0))
    return "━" * full + "╌" * (_WIDTH - full) if row.share is not None else ""


def _aligned(cells: Sequence[Sequence[str]], used: Sequence[int]) -> list[str]:
    if len(cells) < 2:
        return []
    widths = {index: max(len(line[index]) for line in cells) for index in used}
    last = used[-1]
    return [
        "  ".join(line[index] if index == last else line[index].rjust(widths[index]) for index in used).rstrip()
        for line in cells
    ]


def _middle(rows: Sequence[Row]) -> Row | None:
    """Return the row that stands for all: the slowest of those that have not failed."""
    well = [row for row in rows if row.kind != "bad"] or list(rows)
    return min(well, key=lambda row: row.share or 0.0) if well else None
