r"""The states of a pool, and what can be done in each. Pure.

::

    stopped --start--> starting --> idle <--run--> running
                          ^          |
                          |          +--> disconnected  (the ranks live, but their process group is of no use)
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
    DISCONNECTED = "disconnected"
    """The ranks live, but their process group is of no use. It is made anew before the next cell."""
    BROKEN = "broken"
    """A rank has ended. The others keep their variables."""


_POSSIBLE = {
    "start": {PoolState.STOPPED},
    "run": {PoolState.IDLE, PoolState.DISCONNECTED, PoolState.BROKEN},
    "repair": {PoolState.IDLE, PoolState.DISCONNECTED, PoolState.BROKEN},
}

_WHY_NOT = {
    PoolState.STOPPED: "no ranks are running. Start some: %distributed start",
    PoolState.STARTING: "the ranks are being started",
    PoolState.RUNNING: "the ranks are running a cell. Wait for it, or interrupt it: %distributed interrupt",
}


def state_of(*, exists: bool, starts: bool, runs: bool, lacks_ranks: bool, is_disconnected: bool) -> PoolState:
    """Return the state of a pool."""
    if not exists:
        return PoolState.STOPPED
    if starts:
        return PoolState.STARTING
    if runs:
        return PoolState.RUNNING
    if lacks_ranks:
        return PoolState.BROKEN
    return PoolState.DISCONNECTED if is_disconnected else PoolState.IDLE


def check(state: PoolState, action: str) -> None:
    """Check that an action is possible.

    Args:
        action: ``start``, ``run`` or ``repair``.
    """
    if state in _POSSIBLE[action]:
        return
    if action == "start":
        raise PoolError("ranks run already. To start others, and lose what these have: %distributed stop")
    raise PoolError(_WHY_NOT[state])
