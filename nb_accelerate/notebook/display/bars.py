"""Progress bars of the ranks as rows: one for all where they are alike, else one each."""

from __future__ import annotations

import re
from statistics import median
from typing import TYPE_CHECKING

from nb_accelerate.base.topology.rank_lists import ranges
from nb_accelerate.notebook.display import words
from nb_accelerate.notebook.display.view import Row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.base.progress_page import Bar, Sample

_NUMBER = re.compile(r"\d+")

_ALIKE = 0.02
"""Largest difference of bars of several ranks that are one row, as a part of their total."""

_MOST_EACH = 8
"""Largest number of ranks that get a row each for one bar."""

_FEW = 20
"""Largest total of a bar for which no time left is estimated: each item is long, an epoch say."""

_SLOW = 0.1
"""Items a second below which no rate is shown."""


def bar_rows(samples: Mapping[int, Sample]) -> tuple[Row, ...]:
    """Return rows for the progress bars of ranks, outermost bars first."""
    kinds: dict[tuple[int, int, str], dict[int, Bar]] = {}
    for rank, sample in samples.items():
        for index, bar in enumerate(sample.bars):
            kinds.setdefault((bar.level, index, bar.label), {})[rank] = bar
    rows: list[Row] = []
    for _, bars in sorted(kinds.items(), key=lambda item: item[0][:2]):
        if _are_alike(list(bars.values())) or len(bars) > _MOST_EACH:
            rows.append(_row(list(bars), _middle(list(bars.values()))))
        else:
            rows += [_row([rank], bar) for rank, bar in bars.items()]
    return tuple(_folded(rows))


def _folded(rows: Sequence[Row]) -> list[Row]:
    """Leave out a full bar if a later one has the same total and, but for numbers, label: as that of the next epoch."""
    kept: dict[tuple[str, str, str], Row] = {}
    for number, row in enumerate(rows):
        what = (row.ranks, _NUMBER.sub("#", row.label), row.step.rpartition("/")[2])
        before = kept.get(what)
        if before is not None and before.kind != "done":
            what = (*what[:2], f"{what[2]} {number}")  # both move
        kept[what] = row
    return list(kept.values())


def _are_alike(bars: Sequence[Bar]) -> bool:
    counts = [bar.count for bar in bars]
    totals = {bar.total for bar in bars}
    whole = max(*counts, *(total or 0.0 for total in totals), 1.0)
    return len(totals) == 1 and max(counts) - min(counts) <= max(_ALIKE * whole, 1.0)


def _middle(bars: Sequence[Bar]) -> Bar:
    middle = median(bar.count for bar in bars)
    return min(bars, key=lambda bar: abs(bar.count - middle))


def _row(ranks: Sequence[int], bar: Bar) -> Row:
    rate = bar.count / bar.seconds if bar.seconds > 0.2 and bar.count else None
    if bar.ended:
        left = f"took {words.duration(bar.seconds)}"
    elif rate and bar.total and bar.total > _FEW:
        left = f"{words.duration((bar.total - bar.count) / rate)} left"
    else:
        left = ""
    whole = bar.count >= (bar.total or 0)
    return Row(
        ranks=ranges(ranks),
        kind="done" if bar.ended and whole else "",
        share=None if not bar.total else min(1.0, bar.count / bar.total),
        step=words.count(bar.count) if bar.total is None else f"{words.count(bar.count)} / {words.count(bar.total)}",
        rate=words.rate(rate) if rate and rate > _SLOW else "",
        now=left,
        label=bar.label,
    )
