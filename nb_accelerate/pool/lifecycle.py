r"""What a pool does, computed from what there is, and what can be done then. Pure.

::

    stopped --start--> starting --> idle <--run--> running
                          ^          |
                          |          +--> apart   (the ranks are there, but no process group)
                          +--repair--+--> broken  (a rank has ended)

A stop is possible at any time.
"""

from __future__ import annotations

import enum

from nb_accelerate.errors import PoolError


class State(enum.Enum):
    """What a pool is doing."""

    STOPPED = "stopped"
    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    APART = "apart"
    """The ranks are there, but their process group is not: it is made anew before the next cell."""
    BROKEN = "broken"
    """A rank has ended. The others keep what they have."""


_POSSIBLE = {
    "start": {State.STOPPED},
    "run": {State.IDLE, State.APART, State.BROKEN},
    "repair": {State.IDLE, State.APART, State.BROKEN},
}

_WHY_NOT = {
    State.STOPPED: "no ranks are running. Start some: %distributed start",
    State.STARTING: "the ranks are being started",
    State.RUNNING: "the ranks are running a cell. Wait for it, or interrupt it: %distributed interrupt",
}


def state_of(*, exists: bool, starts: bool, runs: bool, lacks_ranks: bool, is_apart: bool) -> State:
    """The state of a pool.

    Args:
        exists: there are ranks, or have been.
        starts: they are being started, or meet again.
        runs: a cell is running.
        lacks_ranks: one has ended.
        is_apart: they have no process group.
    """
    if not exists:
        return State.STOPPED
    if starts:
        return State.STARTING
    if runs:
        return State.RUNNING
    if lacks_ranks:
        return State.BROKEN
    return State.APART if is_apart else State.IDLE


def check(state: State, action: str) -> None:
    """Check that something can be done now.

    Args:
        state: of the pool.
        action: ``start``, ``run`` or ``repair``.

    Raises:
        PoolError: it cannot; says what to do.
    """
    if state in _POSSIBLE[action]:
        return
    if action == "start":
        raise PoolError("ranks run already. To start others, and lose what these have: %distributed stop")
    raise PoolError(_WHY_NOT[state])
