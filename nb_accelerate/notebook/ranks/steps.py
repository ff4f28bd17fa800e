"""The steps by which a request is ended early, after a failure, a timeout or an interrupt.

Each kind of request has a table of steps. Ranks of a launch are terminated; ranks of a pool are taken out of their
collectives and keep their variables (`notebook.pool.ending`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import Phase
from nb_accelerate.notebook.ranks.proxy import RankProxy
from nb_accelerate.notebook.ranks.timeouts import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.base.progress_page import Sample
    from nb_accelerate.notebook.ranks.timeouts import Timeouts


class StepKind(enum.IntEnum):
    """What a step does to ranks that have not answered. A request takes steps in this order only.

    ``ASK`` has them write their stacks, ``INTERRUPT`` raises KeyboardInterrupt in users' code, ``CUT`` breaks the
    connections of their collectives, ``WAIT`` does nothing, ``TERMINATE`` and ``KILL`` send a signal, and ``GIVE_UP``
    waits for them no longer.
    """

    ASK = 0
    INTERRUPT = 1
    CUT = 2
    WAIT = 3
    TERMINATE = 4
    KILL = 5
    GIVE_UP = 6


def saves_in_call(sample: Sample) -> bool:
    """Return whether the call or cell of a rank writes a checkpoint."""
    return sample.phase is Phase.SAVING


def saves_in_background(sample: Sample) -> bool:
    """Return whether a rank writes a checkpoint in a thread, which would end with its process."""
    return sample.saves


def saves(sample: Sample) -> bool:
    """Return whether a rank writes a checkpoint in either way."""
    return saves_in_call(sample) or saves_in_background(sample)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One row of a table.

    Attributes:
        kind: what it does.
        act: called with each rank that has not answered.
        seconds: from this step to the next.
        for_user: the same if the user has interrupted; None if that makes no difference.
        on_interrupt: the step that another interrupt leads to; None ignores it.
        answered: called with each rank that has answered, or answers during this step.
        save: seconds in which ranks may finish writing a checkpoint, unless the user interrupts what ends already.
        is_saving: tells these ranks by what their progress pages say.
        cause: seconds from the first failure in which the real cause is waited for, if all failures so far only say
            that another rank was lost.
        notice: a line for the user if ranks have not answered when the step begins; ``{ranks}`` stands for them.
    """

    kind: StepKind
    act: Callable[[RankProxy], object]
    seconds: float = NEVER
    for_user: float | None = None
    on_interrupt: StepKind | None = None
    answered: Callable[[RankProxy], object] | None = None
    save: float = 0.0
    is_saving: Callable[[Sample], bool] = saves_in_call
    cause: float = 0.0
    notice: str = ""


def ask_for_stacks(rank: RankProxy) -> None:
    """Have a rank write its stacks, unless it cannot: it is not ready, or suspended."""
    if rank.is_ready and not rank.is_stopped:
        rank.ask_for_stacks()


def interrupt(rank: RankProxy) -> None:
    """Raise KeyboardInterrupt in users' code."""
    rank.handle.interrupt()
    if not rank.is_ready:  # it runs no users' code yet that KeyboardInterrupt could end
        rank.quit()


def terminate(rank: RankProxy) -> None:
    """Send SIGTERM to a rank."""
    rank.handle.terminate()


def kill(rank: RankProxy) -> None:
    """Send SIGKILL to a rank."""
    rank.handle.kill()


def leave_alone(_: RankProxy) -> None:
    """Do nothing: the rank gets time."""


def give_up(rank: RankProxy) -> None:
    """Wait for the end of a rank no longer."""
    rank.why_lost = rank.why_lost or "its process did not end when it was killed"


def call_steps(timeouts: Timeouts) -> tuple[Step, ...]:
    """Return the steps that end the call of a launch early. Ranks that have answered may leave."""
    done = RankProxy.quit
    return (
        Step(kind=StepKind.ASK, act=ask_for_stacks, seconds=timeouts.ask, cause=timeouts.cause),
        Step(
            kind=StepKind.INTERRUPT,
            act=interrupt,
            seconds=timeouts.unwind,
            for_user=timeouts.interrupt,
            save=timeouts.save,
            is_saving=saves,
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
    """Return the steps that end the ranks of a launch, which have so many seconds to leave by themselves."""
    return (
        Step(
            kind=StepKind.WAIT,
            act=leave_alone,
            seconds=seconds,
            save=timeouts.save,
            is_saving=saves_in_background,
            on_interrupt=StepKind.TERMINATE,
        ),
        Step(kind=StepKind.TERMINATE, act=terminate, seconds=timeouts.terminate, on_interrupt=StepKind.KILL),
        Step(kind=StepKind.KILL, act=kill),
    )
