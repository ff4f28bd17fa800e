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


class PoolState(enum.Enum):
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
    "start": {PoolState.STOPPED},
    "run": {PoolState.IDLE, PoolState.APART, PoolState.BROKEN},
    "repair": {PoolState.IDLE, PoolState.APART, PoolState.BROKEN},
}

_WHY_NOT = {
    PoolState.STOPPED: "no ranks are running. Start some: %distributed start",
    PoolState.STARTING: "the ranks are being started",
    PoolState.RUNNING: "the ranks are running a cell. Wait for it, or interrupt it: %distributed interrupt",
}


def state_of(*, exists: bool, starts: bool, runs: bool, lacks_ranks: bool, is_apart: bool) -> PoolState:
    """The state of a pool.

    Args:
        exists: there are ranks, or have been.
        starts: they are being started, or meet again.
        runs: a cell is running.
        lacks_ranks: one has ended.
        is_apart: they have no process group.
    """
    if not exists:
        return PoolState.STOPPED
    if starts:
        return PoolState.STARTING
    if runs:
        return PoolState.RUNNING
    if lacks_ranks:
        return PoolState.BROKEN
    return PoolState.APART if is_apart else PoolState.IDLE


def check(state: PoolState, action: str) -> None:
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
