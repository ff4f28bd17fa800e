"""Where the time of ranks goes, as HTML: a thin strip for each, and one line that says what its colours are."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page.phase_times import WORK
from nb_accelerate.notebook.display.phase_times import NAMES, in_words

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from nb_accelerate.notebook.display.phase_times import TimePart

_LEAST = 0.005
"""Part of the time that is not drawn any more."""

_LEAST_SAID = 0.015
"""The same for the line of words, where such parts together are called "other"."""

_OTHER = "other"

_NAMES = {phase.name.lower(): NAMES[phase] for phase in WORK} | {_OTHER: "other"}
"""Of all parts of the line of words, by their kinds, in the order in which they stand there."""


def strip(times: Sequence[TimePart], whose: str) -> str:
    """Return a strip; its place, empty, if nothing is known.

    Args:
        whose: ``rank 3``, say.
    """
    if not times:
        return '<div class="nba-times"></div>'
    inside = "".join(
        f'<i class="nba-t-{one.kind}" style="width:{100 * one.share:.1f}%" title="{one.name} {100 * one.share:.0f} %">'
        "</i>"
        for one in times
        if one.share >= _LEAST
    )
    return f'<div class="nba-times" role="img" aria-label="time of {escape(whose)}: {in_words(times)}">{inside}</div>'


def legend(times: Sequence[TimePart], kept: Collection[str] = ()) -> str:
    """Return the line that says what the colours are, with the time of all ranks together; "" if none is known.

    Args:
        kept: kinds of parts that are named however small they are, because they were named before.
    """
    if not times:
        return ""
    inside = " ".join(
        f'<span><i class="nba-t-{kind}" aria-hidden="true"></i> {_NAMES[kind]} '
        f'<span class="nba-percent">{percent} %</span></span>'
        for kind, percent in _percents(times, kept).items()
    )
    return f'<p class="nba-legend"><span>time<span class="nba-wide"> of all ranks</span>:</span> {inside}</p>'


def kinds_named(times: Sequence[TimePart], kept: Collection[str] = ()) -> set[str]:
    """Return the kinds of the parts that `legend` names."""
    return set(_percents(times, kept)) if times else set()


def _percents(times: Sequence[TimePart], kept: Collection[str]) -> dict[str, int]:
    """Return whole percents by kind, whose sum is 100."""
    shares = {one.kind: one.share for one in times if one.share >= _LEAST_SAID or one.kind in kept}
    shares = dict.fromkeys(kept, 0.0) | shares
    shares[_OTHER] = max(0.0, 1.0 - sum(share for kind, share in shares.items() if kind != _OTHER))
    percents = {kind: int(100 * share) for kind, share in shares.items()}
    missing = 100 - sum(percents.values())
    for kind in sorted(shares, key=lambda kind: percents[kind] - 100 * shares[kind])[:missing]:
        percents[kind] += 1
    if not percents[_OTHER]:
        del percents[_OTHER]
    return {kind: percents[kind] for kind in _NAMES if kind in percents}
