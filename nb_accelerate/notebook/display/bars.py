"""Progress bars of the ranks as lines below the table: one for a bar that several ranks have."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from nb_accelerate.base import words
from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.notebook.display.view import BarLine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.base.progress_page import Bar, Sample

_NUMBER = re.compile(r"\d+")

_TIME_LEFT = re.compile(r"(\[[\d:]+)<[\d:?]+")  # As tqdm writes it: ``[00:05<00:10, ...]``.
_ALIKE = 0.02  # largest difference of counts of ranks that is not told, as a part of the total
_MOST = 12  # lines, at most: of 64 ranks that have a bar each, most are left out


def bar_lines(samples: Mapping[int, Sample], *, has_ended: bool) -> tuple[BarLine, ...]:
    """Return lines for the progress bars of ranks, outermost bars first.

    Args:
        has_ended: the run has, and so have bars that it did not close.
    """
    same: dict[tuple[str, int], dict[int, Bar]] = {}
    for rank, sample in samples.items():
        seen: Counter[str] = Counter()
        for bar in sample.bars:
            label = _NUMBER.sub("#", bar.label)
            same.setdefault((label, seen[label]), {})[rank] = bar
            seen[label] += 1
    groups: list[dict[int, Bar]] = []
    for bars in same.values():
        groups += [{rank: bar} for rank, bar in bars.items()] if _name_ranks(bars) else [bars]
    groups.sort(key=lambda bars: min(bar.level for bar in bars.values()))
    levels = sorted({bar.level for bars in groups for bar in bars.values()})
    lines = [_line(bars, levels, has_ended=has_ended, is_main=min(samples) in bars) for bars in groups[:_MOST]]
    if len(groups) > _MOST:
        lines.append(BarLine(label="", text=f"and {len(groups) - _MOST} more bars"))
    return tuple(lines)


def _name_ranks(bars: Mapping[int, Bar]) -> bool:
    """Return whether labels, which differ in numbers only, have the rank's number in one place."""
    numbers = [_NUMBER.findall(bar.label) for bar in bars.values()]
    return len(bars) > 1 and [str(rank) for rank in bars] in [list(column) for column in zip(*numbers, strict=True)]


def _line(bars: Mapping[int, Bar], levels: Sequence[int], *, has_ended: bool, is_main: bool) -> BarLine:
    """Return the line of a bar, from the first rank that has the bar."""
    first = min(bars)
    bar = bars[first]
    counts = [one.count for one in bars.values()]
    text = bar.text
    has_ended = has_ended or all(one.ended for one in bars.values())
    is_full = bar.total is None or bar.count >= bar.total
    if has_ended:
        text = _TIME_LEFT.sub(r"\1", text) + ("" if is_full else ", ended early")
    if max(counts) - min(counts) > max(_ALIKE * (bar.total or max(counts)), 1.0):
        text += f" (ranks: {words.count(min(counts))} to {words.count(max(counts))})"
    return BarLine(
        label=bar.label if is_main or bar.label else named(list(bars)),
        text=text,
        share=min(1.0, bar.count / bar.total) if bar.total else None,
        kind="" if not has_ended else "done" if is_full else "ended",
        depth=levels.index(bar.level),
    )
