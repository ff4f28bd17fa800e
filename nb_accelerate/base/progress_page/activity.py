"""What a rank does at one moment: its phase, the collective that it waits in, the kind of its loop."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Phase(enum.IntEnum):
    """What a rank does."""

    NOTHING = 0
    RUNNING = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    STEP = 5
    EVALUATING = 6
    SAVING = 7
    WAITING = 8
    ENDED = 9
    PREPARING = 10
    COMPILING = 11
    TRAINING = 12  # forward and backward, where the program does not say which


class Collective(enum.IntEnum):
    """Collectives in which ranks wait for each other."""

    all_gather = 0
    all_reduce = 1
    broadcast = 2
    scatter = 3
    all_gather_object = 4
    broadcast_object = 5
    barrier = 6
    backward = 7  # the exchange of gradients at its end


class Activity(NamedTuple):
    """What a rank does at one moment. A panel shows it only with a line that was read at a moment with the same."""

    phase: Phase = Phase.NOTHING
    waits_in: Collective | None = None  # while the phase is `Phase.WAITING`
    in_loop: bool = False  # a loop over a loader is on
    evaluates: bool = False  # that loop computes no gradients, or has gone on for a while without a backward


_PHASES, _COLLECTIVES = tuple(Phase), tuple(Collective)


def phase_of(number: int) -> Phase:
    """Return the phase of a number on a page. A rank whose number means nothing is running."""
    known = _PHASES[number] if 0 <= number < len(_PHASES) else Phase.NOTHING
    return known or Phase.RUNNING


def collective_of(number: int) -> Collective | None:
    """Return the collective of a number on a page; None if it means nothing."""
    return _COLLECTIVES[number] if 0 <= number < len(_COLLECTIVES) else None
