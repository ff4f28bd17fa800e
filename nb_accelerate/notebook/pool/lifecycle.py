r"""The states of a pool, and what can be done in each. Pure.

::

    stopped --start--> starting --> idle <--run--> running
                          ^           |
                          |           +--> disconnected  (the ranks live, but their process group is of no use)
                          +--restart--+--> broken  (a rank has ended)

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


def check_stopped(state: PoolState) -> None:
    """Refuse to start ranks where there are some."""
    if state is not PoolState.STOPPED:
        raise PoolError("ranks run already. To start others, and lose what these have: %distributed stop")


def check_idle(state: PoolState) -> None:
    """Refuse to run a cell, or to replace a rank, where there are no ranks that wait for one."""
    if state in _WHY_NOT:
        raise PoolError(_WHY_NOT[state])
