"""The steps by which requests of a pool are ended early, and the phrases of their errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.errors import PoolError
from nb_accelerate.notebook.ranks.failing.incidents import Wording
from nb_accelerate.notebook.ranks.steps import (
    Step,
    StepKind,
    ask_for_stacks,
    give_up,
    interrupt,
    kill,
    leave_alone,
    saves_in_background,
)
from nb_accelerate.notebook.ranks.timeouts import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.ranks.proxy import RankProxy
    from nb_accelerate.notebook.ranks.timeouts import Timeouts

_BUSY = (
    "rank {ranks} runs C code that cannot be interrupted; the cell ends when that returns. Interrupt once more to kill "
    "the rank and lose its variables"
)


def cell_steps(timeouts: Timeouts, cut: Callable[[RankProxy], None]) -> tuple[Step, ...]:
    """Return the steps that end a cell early, or the set-up or a rendezvous of ranks.

    A rank that has variables is killed only if the user interrupts again, or ``timeouts.wait`` is over.

    Args:
        cut: takes a rank out of a collective.
    """
    notice = _BUSY if timeouts.wait == NEVER else ""
    return (
        Step(kind=StepKind.ASK, act=ask_for_stacks, seconds=timeouts.ask, cause=timeouts.cause),
        Step(
            kind=StepKind.INTERRUPT,
            act=_interrupt,
            seconds=timeouts.unwind,
            for_user=timeouts.interrupt,
            save=timeouts.save,
        ),
        Step(kind=StepKind.CUT, act=cut, seconds=timeouts.cut),
        Step(kind=StepKind.WAIT, act=leave_alone, seconds=timeouts.wait, on_interrupt=StepKind.KILL, notice=notice),
        Step(kind=StepKind.KILL, act=kill, seconds=timeouts.kill),
        Step(kind=StepKind.GIVE_UP, act=give_up),
    )


def stop_steps(timeouts: Timeouts, *, seconds: float) -> tuple[Step, ...]:
    """Return the steps that end ranks for good.

    Args:
        seconds: how long ranks that were told to end have for it; 0 if they were not told.
    """
    by_signal = (
        Step(kind=StepKind.KILL, act=kill, seconds=timeouts.kill),
        Step(kind=StepKind.GIVE_UP, act=give_up),
    )
    if not seconds:
        return by_signal
    by_itself = Step(
        kind=StepKind.WAIT,
        act=leave_alone,
        seconds=seconds,
        save=timeouts.save,
        is_saving=saves_in_background,
        on_interrupt=StepKind.KILL,
    )
    return by_itself, *by_signal


def _interrupt(rank: RankProxy) -> None:
    if rank.has_joined:
        interrupt(rank)
    else:  # it has no variables yet
        kill(rank)


def _after_end(rank: RankProxy) -> str:
    if not rank.has_joined:
        return " while it was being started"
    if rank.handle.exitcode is None and rank.handle.is_lost_with_others and not rank.why_lost:
        return f". So are all other ranks and their variables. To start them anew: %distributed restart {rank.rank}"
    return (
        f". Its variables are lost; those of the other ranks are kept. To replace it: %distributed restart {rank.rank}"
    )


def wording(what: str) -> Wording:
    """Return the phrases for errors of a request of a pool.

    Args:
        what: what was asked, as the subject of a sentence: ``the cell``.
    """
    return Wording(what=what, after_end=_after_end, unusable=PoolError, unseen=PoolError)
