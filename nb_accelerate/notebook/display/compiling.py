"""What is said about programs that are compiled for a device, and about what ranks warn of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import Phase
from nb_accelerate.notebook.display import words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nb_accelerate.base.progress_page import Sample
    from nb_accelerate.notebook.display.track import Track

_SHORT = 2.0
"""Seconds of compiling that need no number."""


def compiling(tracks: Iterable[Track], now: float) -> str:
    """Say that programs are compiled, and since when; "" if none of these ranks does."""
    since = [track.moved_at for track in tracks if track.sample.phase is Phase.COMPILING]
    if not since:
        return ""
    seconds = now - min(since)
    return f"compiling for {words.brief(seconds)}" if seconds > _SHORT else "compiling"


def compiled(samples: Iterable[Sample]) -> str:
    """Say how many programs were compiled in a run that has ended, and how long that took; "" if none was."""
    number, seconds = max(((sample.compiled, sample.compiling) for sample in samples), default=(0, 0.0))
    return f"{words.plural(number, 'program')} compiled in {words.brief(seconds)}" if number else ""


def warnings_of(samples: Iterable[Sample]) -> tuple[str, ...]:
    """Return the sentences of ranks, each once."""
    return tuple(dict.fromkeys(sample.warning for sample in samples if sample.warning))
