"""The steps by which a request is ended early, after a failure, a timeout or an interrupt.

Each kind of request has a table of steps. Ranks of a launch are terminated; ranks of a pool are taken out of their
collectives and keep their variables.
"""

from __future__ import annotations

import enum
from dataclasses import KW_ONLY, dataclass
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


@dataclass(frozen=True)
class Step:
    """One row of a table."""

    kind: StepKind
    seconds: float = NEVER
    _: KW_ONLY
    # Called with each rank that has not answered; by default what the kind says.
    act: Callable[[RankProxy], object] | None = None
    for_user: float | None = None  # seconds if the user has interrupted; None if that makes no difference.
    on_interrupt: StepKind | None = None  # the step that another interrupt leads to; None ignores it.
    # Called with each rank that has answered, or answers during this step.
    answered: Callable[[RankProxy], object] | None = None
    # Seconds in which ranks may finish writing a checkpoint, unless the user interrupts what ends already.
    save: float = 0.0
    is_saving: Callable[[Sample], bool] = saves_in_call
    # Seconds from the first failure in which the real cause is waited for, if all failures so far only say that another
    # rank was lost.
    cause: float = 0.0
    # A line for the user if ranks have not answered when the step begins; ``{ranks}`` stands for them.
    notice: str = ""

    def take(self, rank: RankProxy) -> None:
        (self.act or _ACTS[self.kind])(rank)


def ask_for_stacks(rank: RankProxy) -> None:
    """Have a rank write its stacks, unless it is not ready."""
    if rank.is_ready:
        rank.ask_for_stacks()


def _interrupt(rank: RankProxy) -> None:
    rank.handle.interrupt()
    if not rank.is_ready:  # it runs no users' code yet that KeyboardInterrupt could end
        rank.quit()


def _give_up(rank: RankProxy) -> None:
    rank.why_lost = rank.why_lost or "its process did not end when it was killed"


_ACTS: dict[StepKind, Callable[[RankProxy], object]] = {
    StepKind.ASK: ask_for_stacks,
    StepKind.INTERRUPT: _interrupt,
    StepKind.WAIT: lambda _: None,
    StepKind.TERMINATE: lambda rank: rank.handle.terminate(),
    StepKind.KILL: lambda rank: rank.handle.kill(),
    StepKind.GIVE_UP: _give_up,
}

_BUSY = (
    "rank {ranks} runs C code that cannot be interrupted; the cell ends when that returns. Interrupt once more to kill "
    "the rank and lose its variables"
)


def call_steps(timeouts: Timeouts) -> tuple[Step, ...]:
    """Return the steps that end the call of a launch early. Ranks that have answered may leave."""
    done = RankProxy.quit
    return (
        Step(StepKind.ASK, timeouts.ask, cause=timeouts.cause),
        Step(
            StepKind.INTERRUPT,
            timeouts.unwind,
            for_user=timeouts.interrupt,
            save=timeouts.save,
            is_saving=saves,
            on_interrupt=StepKind.KILL,
            answered=done,
        ),
        Step(StepKind.TERMINATE, timeouts.terminate, on_interrupt=StepKind.KILL, answered=done),
        Step(StepKind.KILL, answered=done),
    )


def quit_steps(timeouts: Timeouts, *, seconds: float) -> tuple[Step, ...]:
    """Return the steps that end the ranks of a launch, which have so many seconds to leave by themselves."""
    return (
        Step(
            StepKind.WAIT,
            seconds,
            save=timeouts.save,
            is_saving=saves_in_background,
            on_interrupt=StepKind.TERMINATE,
        ),
        Step(StepKind.TERMINATE, timeouts.terminate, on_interrupt=StepKind.KILL),
        Step(StepKind.KILL),
    )


def cell_steps(timeouts: Timeouts, cut: Callable[[RankProxy], None]) -> tuple[Step, ...]:
    """Return the steps that end a cell early, or the set-up or a rendezvous of ranks of a pool.

    A rank that has variables is killed only if the user interrupts again, or ``timeouts.wait`` is over.
    """
    notice = _BUSY if timeouts.wait == NEVER else ""
    return (
        Step(StepKind.ASK, timeouts.ask, cause=timeouts.cause),
        Step(
            StepKind.INTERRUPT,
            timeouts.unwind,
            act=lambda rank: _interrupt(rank) if rank.has_joined else rank.handle.kill(),  # it has no variables yet
            for_user=timeouts.interrupt,
            save=timeouts.save,
        ),
        Step(StepKind.CUT, timeouts.cut, act=cut),
        Step(StepKind.WAIT, timeouts.wait, on_interrupt=StepKind.KILL, notice=notice),
        Step(StepKind.KILL, timeouts.kill),
        Step(StepKind.GIVE_UP),
    )


def stop_steps(timeouts: Timeouts, *, seconds: float) -> tuple[Step, ...]:
    """Return the steps that end ranks of a pool, which have so many seconds to leave; 0 if they were not told to."""
    by_signal = Step(StepKind.KILL, timeouts.kill), Step(StepKind.GIVE_UP)
    if not seconds:
        return by_signal
    by_itself = Step(
        StepKind.WAIT, seconds, save=timeouts.save, is_saving=saves_in_background, on_interrupt=StepKind.KILL
    )
    return by_itself, *by_signal
