"""Something that ranks are asked to do together, and how it ends.

::

    sent --> all have answered -------------------------------------------------------------+
      |                                                                                      +--> done
      +--> one has failed, ended, or is late --> the first step --> the next --> ... --> all answered or ended
      +--> the user interrupts ----------------> the step "interrupt" --> ...

How a request ends before its time is a table of steps, each for the ranks that have not answered yet and with its
deadline: see `nb_accelerate.ranks.steps`.

All of this runs in the loop's thread. What ranks answered is unpickled later, by whoever asked and closes the request.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nb_accelerate.diagnostics.stacks import STOPPED
from nb_accelerate.display.words import label
from nb_accelerate.progress_page import Phase
from nb_accelerate.protocol.messages import CellEnd, Failure, Parcel, Result
from nb_accelerate.ranks.failures import Incident, IncidentKind, ended_as, first_cause, oom_kills
from nb_accelerate.ranks.input_requests import InputRequests
from nb_accelerate.ranks.process_watch import look_whether_stopped
from nb_accelerate.ranks.steps import StepKind, ask_for_stacks
from nb_accelerate.ranks.timeouts import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.display import Panel
    from nb_accelerate.ranks.failures import Wording
    from nb_accelerate.ranks.proxy import RankProxy
    from nb_accelerate.ranks.steps import Step

    Answer = tuple[Result | Failure, tuple[int, ...]]

logger = logging.getLogger(__name__)

_NUDGE_EVERY = 0.15
"""Seconds from an interrupt until ranks are nudged that were about to wait for something when it came."""


class Awaits(enum.Enum):
    """What a rank has to do for a request to be done with it."""

    READY = "to say that it is set up"
    ANSWER = "to answer"
    END = "to end"


@dataclass(eq=False, kw_only=True)
class Request:
    """Ask with `begin`; afterwards events come in, until `done` is set.

    Attributes:
        ranks: who is asked.
        send: asks one of them.
        steps: how it ends before its time.
        wording: how errors speak of it.
        awaits: what each rank has to do.
        world_size: number of all ranks.
        start: seconds until all are ready.
        timeout: seconds from when all are ready; None is no limit.
        say: takes a line for the user.
        panel: shows how far the ranks are.
        keeps_panel: the panel outlives the request, and whoever made it has it show the end.
        attended: somebody waits for it, and can be asked for input.
        answers: by rank.
        ends: of cells, by rank.
        incidents: what went wrong, as it came.
        failure: why it is done although not everybody has answered: the loop itself has ended.
        step: the step it is in; None while all goes well.
        taken: steps that were taken on some rank.
        callbacks: called in the loop's thread just before it is done; errors in them cost output only.
        take_note: the same, for what must not be lost.
        is_unwanted: it was interrupted before it has begun.
        oom_kills_before: what `oom_kills` gave when it began.
        input_requests: of debuggers on ranks.
        done: everybody has answered or has ended.
    """

    ranks: Sequence[RankProxy]
    send: Callable[[RankProxy], object]
    steps: Sequence[Step]
    wording: Wording
    awaits: Awaits = Awaits.ANSWER
    world_size: int = 1
    start: float = NEVER
    timeout: float | None = None
    say: Callable[[str], object] = lambda _: None
    panel: Panel | None = None
    keeps_panel: bool = False
    attended: bool = True
    take_note: Callable[[], object] = lambda: None
    answers: dict[int, Answer] = field(default_factory=dict)
    ends: dict[int, CellEnd] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    failure: BaseException | None = None
    step: Step | None = None
    taken: set[StepKind] = field(default_factory=set)
    callbacks: list[Callable[[], object]] = field(default_factory=list)
    is_unwanted: bool = False
    oom_kills_before: int = 0
    input_requests: InputRequests = field(default_factory=InputRequests)
    done: threading.Event = field(default_factory=threading.Event)
    _step_ends: float = NEVER
    _again_at: float = NEVER
    _start_ends: float = NEVER
    _late_at: float = NEVER
    _told_of_save: bool = False
    _given_away: set[int] = field(default_factory=set)
    _unasked: set[int] = field(default_factory=set)
    _unaided: set[int] = field(default_factory=set)
    """Ranks that came to the end by themselves: where they were on the way there explains nothing."""

    # What it is.

    @property
    def waiting(self) -> list[RankProxy]:
        """Ranks that were asked, and have neither answered nor ended."""
        done = self.answers.keys() | self._unasked if self.awaits is not Awaits.END else self._unasked
        return [one for one in self.ranks if one.rank not in done and not one.is_gone]

    @property
    def due(self) -> float:
        """When `act` has something to do, as `time.monotonic`."""
        return min(self._step_ends, self._again_at, self._start_ends, self._late_at)

    @property
    def deadline(self) -> float:
        """The next moment at which what has not come is late, as `time.monotonic`."""
        return min(self._start_ends, self._late_at) if self.step is None else self._step_ends

    @property
    def is_being_ended(self) -> bool:
        """Ranks were signalled: what they report from then on, and how they end, is our doing and no cause."""
        return self.step is not None and self.step.kind > StepKind.ASK

    @property
    def was_interrupted(self) -> bool:
        """The user has interrupted it."""
        return any(one.kind is IncidentKind.INTERRUPTED for one in self.incidents)

    @property
    def failed_rank(self) -> int | None:
        """Whose failure came first, if any failed."""
        failed = [one for one in self.incidents if one.kind is IncidentKind.FAILED]
        first = first_cause(failed) if failed else None
        return first.rank.rank if first is not None and first.rank is not None else None

    @property
    def stacks(self) -> dict[int, str]:
        """What ranks were doing when they were asked, and did not come out of by themselves, by rank."""
        return {
            one.rank: STOPPED if one.is_stopped else bytes(one.stacks).decode(errors="replace")
            for one in self.ranks
            if (one.stacks or one.is_stopped) and one.rank not in self._unaided
        }

    # What can happen.

    def begin(self) -> None:
        """Ask everybody."""
        for rank in self.ranks:
            if self.awaits is not Awaits.END:  # else they may belong to what went wrong before
                rank.stacks.clear()
                rank.is_stopped = False
            try:
                self.send(rank)
            except Exception as error:
                self._unasked.add(rank.rank)
                self._add(Incident(kind=IncidentKind.UNASKED, when=time.monotonic(), rank=rank, error=error))
        for rank in self.ranks:
            if rank.is_gone:  # since it was chosen; nobody will tell of it any more
                self.ended(rank)
        now = time.monotonic()
        self._start_ends = now + self.start
        if self.awaits is Awaits.READY or all(rank.is_ready for rank in self.ranks):
            self._all_are_ready(now)
        if self.awaits is Awaits.END:
            self._enter(self.steps[0].kind)
        if self.is_unwanted:
            self.interrupt()

    def ready(self, rank: RankProxy) -> None:
        """Take note of a rank that is set up."""
        if self.awaits is Awaits.READY:
            self.answered(rank, Result(parcel=Parcel()), ())
        elif all(one.is_ready for one in self.ranks):
            self._all_are_ready(time.monotonic())

    def answered(self, rank: RankProxy, message: Result | Failure | CellEnd, fds: tuple[int, ...]) -> None:
        """Take note of an answer."""
        if isinstance(message, CellEnd):
            self.ends[rank.rank] = message
            message = message.answer
        self.answers[rank.rank] = (message, fds)
        self.input_requests.gone(rank.rank)
        if self.step is not None and self.step.answered is not None:
            self.step.answered(rank)
        if self.is_being_ended:
            return
        if not (isinstance(message, Failure) and message.peer_lost):
            self._unaided.add(rank.rank)
        if isinstance(message, Failure):
            incident = Incident(
                kind=IncidentKind.FAILED,
                when=message.when,
                rank=rank,
                failure=(message, fds),
                tail=rank.output.tail,
            )
            self._add(incident, goes_on=message.returned)  # the others may finish: their values can travel

    def ended(self, rank: RankProxy) -> None:
        """Take note of a rank whose process has ended, or that is of no use any more."""
        self.input_requests.gone(rank.rank)
        if self.awaits is Awaits.END or rank.rank in self.answers:
            return
        if self.step is not None and self.step.kind >= StepKind.TERMINATE:
            return
        incident = Incident(
            kind=IncidentKind.DIED,
            when=time.monotonic(),
            rank=rank,
            tail=rank.output.tail,
            is_consequence=self.is_being_ended,
            out_of_memory=oom_kills() > self.oom_kills_before,
        )
        self._add(incident)

    def interrupt(self, kind: StepKind = StepKind.INTERRUPT, how: str = "interrupted") -> None:
        """End it early, since the user does not want to wait; a second time, without regard for the ranks.

        Args:
            kind: the step to go to.
            how: what the user has done.
        """
        again = self.was_interrupted
        self.incidents.append(Incident(kind=IncidentKind.INTERRUPTED, when=time.monotonic(), how=how))
        step = self.step
        if step is not None and step.on_interrupt is not None and (again or self.awaits is Awaits.END):
            self._enter(step.on_interrupt)
        elif step is None or step.kind < kind:
            self._enter(kind)

    def expire(self) -> None:
        """Take its time for up; in the loop's thread, see `RankLoop.post`."""
        if self._late_at < NEVER:
            self._late_at = 0.0

    def extend_step(self) -> None:
        """Give the step it is in its time once more."""
        if self.step is not None:
            self._step_ends = time.monotonic() + self.step.seconds

    def act(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if now >= min(self._start_ends, self._late_at):
            kind = IncidentKind.NOT_STARTED if now >= self._start_ends else IncidentKind.LATE
            self._start_ends = self._late_at = NEVER
            late = [one for one in self.waiting if kind is IncidentKind.LATE or not one.is_ready]
            self._add(Incident(kind=kind, when=now, late=tuple(one.rank for one in late)))
        if self.step is None:
            return
        if now >= self._step_ends:
            if self._lacks_a_cause(now) or self._is_saving(now):
                self._step_ends = now + self.step.seconds
            else:
                self._enter(StepKind(self.step.kind + 1))
        elif now >= self._again_at:
            is_asking = self.step.kind is StepKind.ASK
            self._again_at = NEVER if is_asking else now + _NUDGE_EVERY
            for rank in self.waiting:
                with contextlib.suppress(Exception):  # it has been tried before
                    if is_asking:  # by now it is where it waits, and not on the way there
                        ask_for_stacks(rank)
                    elif rank.is_ready:
                        rank.handle.nudge()

    # How it is done with.

    def finish_panel(self) -> None:
        """Have its panel show how it ended, unless the panel outlives it."""
        if self.panel is not None and not self.keeps_panel:
            self.panel.finish(*ended_as(self))

    def finish(self) -> None:
        """Let go of who waits for it: everybody has answered."""
        self.done.set()
        self.input_requests.close()

    def fail(self, error: BaseException) -> None:
        """Nobody will answer any more: the loop has ended."""
        self.failure = error
        self.finish()

    def take(self, rank: int) -> Answer:
        """What a rank answered; its descriptors are then the caller's."""
        self._given_away.add(rank)
        return self.answers[rank]

    def close(self) -> None:
        """Close descriptors of answers that nobody took."""
        for rank in self.answers.keys() - self._given_away:
            for fd in self.take(rank)[1]:
                os.close(fd)

    # Inside.

    def _all_are_ready(self, now: float) -> None:
        self._start_ends = NEVER
        if self.timeout is not None:
            self._late_at = now + self.timeout

    def _add(self, incident: Incident, *, goes_on: bool = False) -> None:
        self.incidents.append(incident)
        if self.step is None and not goes_on:
            for rank in self.waiting:
                look_whether_stopped(rank, self._say_without_panel)
            self._enter(self.steps[0].kind)

    def _say_without_panel(self, line: str) -> None:
        if self.panel is None:  # which shows by itself that a rank is stopped
            self.say(line)

    def _lacks_a_cause(self, now: float) -> bool:
        """All that is known is that ranks have lost another one, and that one has not been heard of yet."""
        assert self.step is not None
        return (
            bool(self.incidents)
            and all(incident.peer_lost for incident in self.incidents)
            and now < self.incidents[0].when + self.step.cause
        )

    def _is_saving(self, now: float) -> bool:
        """Whether ranks write a checkpoint, which the user who has interrupted once would lose."""
        assert self.step is not None
        interrupts = [one.when for one in self.incidents if one.kind is IncidentKind.INTERRUPTED]
        if len(interrupts) != 1 or now >= interrupts[0] + self.step.save:
            return False
        saving = [one.rank for one in self.waiting if one.handle.page.read().phase is Phase.SAVING]
        if saving and not self._told_of_save:
            self._told_of_save = True
            self.say(f"{label(saving)} {'is' if len(saving) == 1 else 'are'} saving. Interrupt once more not to wait")
        return bool(saving)

    def _enter(self, kind: StepKind) -> None:
        step = self.step = next(one for one in self.steps if one.kind >= kind)
        seconds = step.for_user if step.for_user is not None and self.was_interrupted else step.seconds
        now = time.monotonic()
        self._step_ends = now + seconds
        again = {StepKind.ASK: seconds / 2, StepKind.INTERRUPT: _NUDGE_EVERY}
        self._again_at = now + again.get(step.kind, NEVER)
        waiting = self.waiting
        if waiting:
            self.taken.add(step.kind)
        for rank in waiting:
            _try(step.act, rank)
        if step.answered is not None:
            for rank in self.ranks:
                if rank.rank in self.answers:
                    _try(step.answered, rank)
        if step.notice and waiting:
            self.say(step.notice.format(ranks=", ".join(str(one.rank) for one in waiting)))


def _try(act: Callable[[RankProxy], object], rank: RankProxy) -> None:
    try:
        act(rank)
    except Exception:  # what cannot be done to one rank keeps nothing from those that follow
        logger.warning("Rank %s could not be told to end.", rank.rank, exc_info=True)
