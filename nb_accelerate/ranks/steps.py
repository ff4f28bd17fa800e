"""How a request ends before its time: tables of steps.

A launch and a cell differ in their tables: ranks of a launch are terminated, those of a pool are taken out of their
collectives and keep their variables (`nb_accelerate.pool.ending`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.ranks.timeouts import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.ranks.proxy import RankProxy
    from nb_accelerate.ranks.timeouts import Timeouts


class StepKind(enum.IntEnum):
    """The steps that a request can take before its time, in their order."""

    ASK = 0
    INTERRUPT = 1
    CUT = 2
    WAIT = 3
    TERMINATE = 4
    KILL = 5
    GIVE_UP = 6


@dataclass(frozen=True, kw_only=True)
class Step:
    """A row of the table by which a request ends.

    Attributes:
        kind: names it.
        act: does it to one rank that has not answered.
        seconds: until the next step.
        for_user: the same if the user has interrupted; None if that makes no difference.
        on_interrupt: where another interrupt in this step leads; None ignores it.
        answered: does something to ranks that have answered, or answer in this step.
        save: seconds that ranks have which write a checkpoint, if the user has interrupted once.
        cause: seconds that a real cause is waited for, while all that is known is that ranks have lost another.
        notice: what to say if ranks are left, with ``{ranks}`` for their numbers.
    """

    kind: StepKind
    act: Callable[[RankProxy], object]
    seconds: float = NEVER
    for_user: float | None = None
    on_interrupt: StepKind | None = None
    answered: Callable[[RankProxy], object] | None = None
    save: float = 0.0
    cause: float = 0.0
    notice: str = ""


def ask_for_stacks(rank: RankProxy) -> None:
    """Ask where it is, unless it cannot answer."""
    if rank.is_ready and not rank.is_stopped:
        rank.ask_for_stacks()


def interrupt(rank: RankProxy) -> None:
    """Raise KeyboardInterrupt in users' code."""
    rank.handle.interrupt()
    if not rank.is_ready:  # it may be long in coming, and there is nothing to wait for
        rank.quit()


def terminate(rank: RankProxy) -> None:
    """Ask the process to end."""
    rank.handle.terminate()


def kill(rank: RankProxy) -> None:
    """End the process."""
    rank.handle.kill()


def leave_alone(_: RankProxy) -> None:
    """Give it time."""


def give_up(rank: RankProxy) -> None:
    """Wait for its end no longer."""
    rank.why_lost = rank.why_lost or "its process did not end when it was killed"


def call_steps(timeouts: Timeouts) -> tuple[Step, ...]:
    """How the call of a launch ends: nobody needs its ranks afterwards, so those that have answered may go."""
    seconds, user, done = timeouts.unwind, timeouts.interrupt, _quit
    return (
        Step(kind=StepKind.ASK, act=ask_for_stacks, seconds=timeouts.ask, cause=timeouts.cause),
        Step(
            kind=StepKind.INTERRUPT,
            act=interrupt,
            seconds=seconds,
            for_user=user,
            save=timeouts.save,
            on_interrupt=StepKind.KILL,
            answered=done,
        ),
        Step(
            kind=StepKind.TERMINATE,
            act=terminate,
            seconds=timeouts.terminate,
            on_interrupt=StepKind.KILL,
            answered=done,
        ),
        Step(kind=StepKind.KILL, act=kill, answered=done),
    )


def quit_steps(timeouts: Timeouts, *, seconds: float) -> tuple[Step, ...]:
    """How the ranks of a launch end: by themselves within so many seconds, or by a signal."""
    return (
        Step(kind=StepKind.WAIT, act=leave_alone, seconds=seconds, on_interrupt=StepKind.TERMINATE),
        Step(kind=StepKind.TERMINATE, act=terminate, seconds=timeouts.terminate, on_interrupt=StepKind.KILL),
        Step(kind=StepKind.KILL, act=kill),
    )


def _quit(rank: RankProxy) -> None:
    rank.quit()
