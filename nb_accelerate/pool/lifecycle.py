r"""The life of a pool, as a table of allowed moves. Pure.

::

    stopped --start--> starting --joined--> idle <--ended-- running
                         ^                   |  \\--run------^
                         |                   |
                       repair             broke off --> apart --join--> idle
                         |                   |
                         +------ broken <--lost (a rank has ended)

    stop leads from anywhere to stopped.
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


_MOVES: dict[tuple[State, str], State] = {
    (State.STOPPED, "start"): State.STARTING,
    (State.STARTING, "joined"): State.IDLE,
    (State.STARTING, "lost"): State.BROKEN,
    (State.STARTING, "broke off"): State.APART,
    (State.IDLE, "run"): State.RUNNING,
    (State.IDLE, "broke off"): State.APART,
    (State.IDLE, "lost"): State.BROKEN,
    (State.IDLE, "repair"): State.STARTING,
    (State.RUNNING, "ended"): State.IDLE,
    (State.RUNNING, "broke off"): State.APART,
    (State.RUNNING, "lost"): State.BROKEN,
    (State.APART, "repair"): State.STARTING,
    (State.APART, "run"): State.RUNNING,
    (State.APART, "broke off"): State.APART,
    (State.APART, "lost"): State.BROKEN,
    (State.BROKEN, "repair"): State.STARTING,
    (State.BROKEN, "run"): State.RUNNING,
    (State.BROKEN, "lost"): State.BROKEN,
    **{(state, "stop"): State.STOPPED for state in State},
}

_WHY_NOT = {
    State.STOPPED: "no ranks are running. Start some: %distributed start",
    State.STARTING: "the ranks are being started",
    State.RUNNING: "the ranks are running a cell. Wait for it, or interrupt it: %distributed interrupt",
}


def move(state: State, event: str) -> State:
    """The state that follows.

    Raises:
        PoolError: there is no such move; says what to do.
    """
    try:
        return _MOVES[state, event]
    except KeyError:
        if event == "start":
            raise PoolError("ranks run already. To start others, and lose what these have: %distributed stop") from None
        raise PoolError(_WHY_NOT.get(state, f"the ranks are {state.value}")) from None
