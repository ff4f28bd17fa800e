"""Timeouts for starting, running and ending ranks. `Launch.timeouts` and `Pool.timeouts` have other values."""

from __future__ import annotations

from dataclasses import dataclass

NEVER = float("inf")
"""A deadline, or a number of seconds, that never comes."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts in seconds. The steps they are for are in `notebook.ranks.steps`.

    Attributes:
        start: without progress of ranks that start, until they are given up; see `notebook.ranks.start_watch`.
        ask: from a failure until ranks are interrupted. In it they write their stacks, and failures of other ranks that
            arrive are compared: the earliest is the cause.
        cause: from a failure that only says that another rank was lost, until that rank's own end is known; 0 does not
            wait for it.
        interrupt: from a user's interrupt until the next step. Users' code handles KeyboardInterrupt in it.
        unwind: the same after a failure. Shorter, since ranks are then usually in a collective and cannot react.
        save: from what ends a call until checkpoints that ranks write are given up, as by an interrupt (the second if
            the user's interrupt ended it).
        cut: from breaking the connections of a collective until the next step. The collective fails in it.
        wait: for C code that cannot be interrupted to return, before its rank is killed.
        rendezvous: the same while ranks of a pool are set up and join a process group, when no code of users runs.
        terminate: from SIGTERM to SIGKILL.
        kill: from SIGKILL until a process that has not ended counts as lost.
        quit: from `Quit` until a rank is terminated. Exit handlers of users and libraries run in it.
        fold: from a line of one rank until it is shown although other ranks have not printed it.
        quiet: from the last sign of progress until ranks are asked where they are.
        told: from when ranks wait for others in the same place until the user is told.
        stacks: for ranks to write their stacks while they run.
        deadlock: from when nobody is left for whom the ranks that wait could wait, until the request is ended.
    """

    start: float = 120.0
    ask: float = 0.3
    cause: float = 5.0
    interrupt: float = 1.0
    unwind: float = 0.4
    save: float = 600.0
    cut: float = 2.0
    wait: float = NEVER
    rendezvous: float = 10.0
    terminate: float = 0.4
    kill: float = 5.0
    quit: float = 10.0
    fold: float = 0.3
    quiet: float = 3.0
    told: float = 8.0
    stacks: float = 0.3
    deadlock: float = 30.0
