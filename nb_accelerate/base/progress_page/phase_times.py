"""The time that a rank spends in each phase: added up in the rank, so that it is known however seldom one looks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import layout
from nb_accelerate.base.progress_page.facts import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TIMES = slice(layout.NANOSECONDS, layout.SINCE)  # words with the nanoseconds of phases
_ENDLESS = 10**18  # Nanoseconds, some thirty years. Who has spent more in a phase has not written this word.

# Phases that take time, in the order in which they are shown.
WORK = (
    Phase.DATA,
    Phase.TRAINING,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.WAITING,
    Phase.STEP,
    Phase.EVALUATING,
    Phase.SAVING,
    Phase.RUNNING,
)

_WORK_SLOTS = tuple((phase, layout.NANOSECONDS + phase) for phase in WORK)  # with the word that has the time of each


def clock_of(words: memoryview[int]) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Return functions that note which phase begins, and that forget all times."""
    # Closures, since loops call the first several times a step: about 0.17 µs, a third of it for the system's clock.
    # The beginning of the current phase is not written: it is where counting began plus all times since.
    spent = [0] * layout.NUM_WORDS
    slot, since = layout.NANOSECONDS, 0
    clock, phase_word, first_slot = time.monotonic_ns, layout.PHASE, layout.NANOSECONDS

    def enter(phase: int) -> None:
        nonlocal slot, since
        now = clock()
        # No call from here on: a signal's handler, which may enter a phase as well, runs before or after.
        words[slot] = spent[slot] = spent[slot] + now - since
        since = now
        words[phase_word] = phase
        slot = first_slot + phase

    def forget() -> None:
        nonlocal slot, since
        for index in range(first_slot, layout.SINCE):
            words[index] = spent[index] = 0
        slot = first_slot
        words[layout.SINCE] = since = clock()

    forget()
    return enter, forget


def seconds_in(words: Sequence[int], now: int) -> dict[Phase, float]:
    """Return the seconds that were spent in each phase of `WORK` that took any; `now` is a `time.monotonic_ns`."""
    seconds = {}
    current = layout.NANOSECONDS + words[layout.PHASE]
    for phase, slot in _WORK_SLOTS:
        spent = words[slot]
        if slot == current:
            spent += _open(words, now)
        if 0 < spent < _ENDLESS:
            seconds[phase] = spent / 1e9
    return seconds


def _open(words: Sequence[int] | memoryview[int], now: int) -> int:
    """Return the nanoseconds since the current phase began: those since counting began that no phase has yet."""
    since = words[layout.SINCE]
    return max(0, now - since - sum(words[_TIMES])) if since > 0 else 0
