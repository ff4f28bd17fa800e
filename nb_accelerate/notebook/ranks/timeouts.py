"""Timeouts for starting, running and ending ranks. `Launch.timeouts` and `Pool.timeouts` have other values."""

from __future__ import annotations

from dataclasses import dataclass

NEVER = float("inf")  # a deadline, or a number of seconds, that never comes


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts in seconds. The steps they are for are in `notebook.ranks.steps`."""

    # Seconds without progress until ranks that start are given up; see `notebook.ranks.start_watch`.
    start: float = 120.0
    # From a failure until ranks are interrupted. In it they write their stacks, and failures of other ranks that arrive
    # are compared: the earliest is the cause.
    ask: float = 0.3
    # From a failure that only says that another rank was lost, until that rank's own end is known; 0 does not wait for
    # it.
    cause: float = 5.0
    interrupt: float = 1.0  # from a user's interrupt until the next step. Users' code handles KeyboardInterrupt in it.
    # The same after a failure. Shorter, since ranks are then usually in a collective and cannot react.
    unwind: float = 0.4
    # From what ends a call until checkpoints that ranks write are given up, as by an interrupt (the second if the
    # user's interrupt ended it).
    save: float = 600.0
    cut: float = 2.0  # from breaking the connections of a collective until the next step. The collective fails in it.
    wait: float = NEVER  # for C code that cannot be interrupted to return, before its rank is killed
    # The same while ranks of a pool are set up and join a process group, when no code of users runs.
    rendezvous: float = 10.0
    terminate: float = 0.4  # from SIGTERM to SIGKILL
    kill: float = 5.0  # from SIGKILL until a process that has not ended counts as lost
    quit: float = 10.0  # from `Quit` until a rank is terminated. Exit handlers of users and libraries run in it.
    fold: float = 0.3  # from a line of one rank until it is shown although other ranks have not printed it
    quiet: float = 3.0  # from the last sign of progress until ranks are asked where they are
    told: float = 8.0  # from when ranks wait for others in the same place until the user is told
    stacks: float = 0.3  # for ranks to write their stacks while they run
    # From when nobody is left for whom the ranks that wait could wait, until the request is ended.
    deadlock: float = 30.0
