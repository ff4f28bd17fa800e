"""Where the time of ranks goes, as HTML: a thin strip for each, and one line that says what its colours are."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nb_accelerate.display.phase_times import in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.display.phase_times import TimePart

_LEAST = 0.005
"""Part of the time that is not drawn any more."""

_LEAST_SAID = 0.015
"""The same for the line of words, which would be longer than a narrow cell."""


def strip(times: Sequence[TimePart], whose: str) -> str:
    """Return a strip; its place, empty, if nothing is known.

    Args:
        times: parts of the time.
        whose: ``rank 3``, say.
    """
    if not times:
        return '<div class="nba-times"></div>'
    inside = "".join(
        f'<i class="nba-t-{one.kind}" style="width:{100 * one.share:.1f}%" title="{_percent(one)}"></i>'
        for one in times
        if one.share >= _LEAST
    )
    return f'<div class="nba-times" role="img" aria-label="time of {escape(whose)}: {in_words(times)}">{inside}</div>'


def legend(times: Sequence[TimePart]) -> str:
    """Return the line that says what the colours are, with the time of all ranks together; "" if none is known."""
    if not times:
        return ""
    inside = " ".join(
        f'<span><i class="nba-t-{one.kind}" aria-hidden="true"></i> {_percent(one)}</span>'
        for one in times
        if one.share >= _LEAST_SAID
    )
    return f'<p class="nba-legend">{inside}</p>'


def _percent(one: TimePart) -> str:
    return f"{one.name} {100 * one.share:.0f} %"
