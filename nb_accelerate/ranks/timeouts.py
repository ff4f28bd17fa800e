"""How long the steps of running ranks may take. Given from outside: `Launch.timeouts` and `Pool.timeouts`."""

from __future__ import annotations

from dataclasses import dataclass

NEVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Deadlines of a request, all in seconds.

    Attributes:
        start: until every rank is ready; importing torch from a slow disk is the longest part of it.
        ask: for the stacks of ranks after a failure. Failures of other ranks that arrive within it are compared, and
            the earliest is the cause.
        cause: for the end of a rank whose loss is all that the others have reported; 0 does not wait for it.
        interrupt: for users' code to react to KeyboardInterrupt, when the user interrupts.
        unwind: the same after a failure: ranks are then most often stuck in a collective and cannot react.
        save: for checkpoints that ranks write when the user interrupts, or because of it; another interrupt ends that.
        cut: for a collective to fail after its connections were broken.
        wait: for C code to return that nothing can interrupt, before its rank is killed.
        rendezvous: the same while ranks of a pool are set up and meet, when no code of users runs.
        terminate: from SIGTERM to SIGKILL.
        kill: for a killed process to end; then it counts as lost.
        quit: from `Quit` until a rank has ended: exit handlers of users and libraries run in it.
        fold: that an item of output waits for the same item of the other ranks.
        quiet: without any movement, after which ranks are asked whether they wait for one another in vain.
        stacks: for the stacks of ranks that are asked while they run.
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
    stacks: float = 0.3
