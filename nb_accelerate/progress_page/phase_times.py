"""The time that a rank spends in each phase: added up in the rank, so that it is known however seldom one looks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.progress_page import layout
from nb_accelerate.progress_page.layout import Collective, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ENDLESS = 10**18
"""Nanoseconds, some thirty years. Who has spent more in a phase has not written this word."""

WORK = (
    Phase.DATA,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.WAITING,
    Phase.STEP,
    Phase.EVALUATING,
    Phase.SAVING,
    Phase.RUNNING,
)
"""Phases that take time, in the order in which they are shown."""


@dataclass(frozen=True)
class PhaseClock:
    """Functions that write the times of a page. Closures, since loops call them several times a step.

    Attributes:
        enter: notes which phase begins, and how long the one before took; takes about 0.3 µs.
        exchange: begins to wait for the exchange of gradients.
        forget: forgets all times.
    """

    enter: Callable[[int], None]
    exchange: Callable[[], None]
    forget: Callable[[], None]


def clock_of(words: memoryview[int]) -> PhaseClock:
    """Return a clock that writes to the words of a page."""
    num_slots = layout.EXCHANGING - layout.NANOSECONDS + 1
    spent = [0] * num_slots
    slot, since = 0, 0
    clock = time.monotonic_ns

    def enter(phase: int) -> None:
        nonlocal slot, since
        now = clock()
        spent[slot] = total = spent[slot] + now - since
        words[layout.NANOSECONDS + slot] = total
        words[layout.SINCE] = since = now
        words[layout.PHASE] = slot = phase

    def exchange() -> None:
        nonlocal slot
        enter(Phase.WAITING)
        words[layout.WAITS_IN] = Collective.backward
        slot = layout.EXCHANGING - layout.NANOSECONDS

    def forget() -> None:
        nonlocal slot, since
        spent[:] = [0] * num_slots
        slot, since = 0, clock()

    return PhaseClock(enter, exchange, forget)


def seconds_in(words: Sequence[int], now: int) -> dict[Phase, float]:
    """Return the seconds that were spent in each phase of `WORK` that took any.

    Args:
        words: of the page.
        now: `time.monotonic_ns` of the machine that the rank is on.
    """
    found = {}
    for phase in WORK:
        spent = words[layout.NANOSECONDS + phase] + (words[layout.EXCHANGING] if phase is Phase.WAITING else 0)
        if phase == words[layout.PHASE]:
            spent += _open(words, now)
        if 0 < spent < _ENDLESS:
            found[phase] = spent / 1e9
    return found


def seconds_exchanging(words: Sequence[int], now: int) -> float:
    """Return the seconds spent in the exchange of gradients that were counted, see `seconds_in`."""
    spent = words[layout.EXCHANGING]
    if _is_exchanging(words):
        spent += _open(words, now)
    return spent / 1e9 if 0 < spent < _ENDLESS else 0.0


def settle(words: memoryview[int], now: int) -> None:
    """Add the time of the current phase to a copy of a page that is read later, or on another machine.

    Args:
        words: of the copy.
        now: `time.monotonic_ns`.
    """
    if words[layout.PHASE] in WORK:
        slot = layout.EXCHANGING if _is_exchanging(words) else layout.NANOSECONDS + words[layout.PHASE]
        words[slot] += _open(words, now)
    words[layout.SINCE] = 0


def _is_exchanging(words: Sequence[int] | memoryview[int]) -> bool:
    return words[layout.PHASE] == Phase.WAITING and words[layout.WAITS_IN] == Collective.backward


def _open(words: Sequence[int] | memoryview[int], now: int) -> int:
    """Return the nanoseconds since the current phase began."""
    since = words[layout.SINCE]
    return now - since if 0 < since < now else 0
