"""A request: what ranks are asked to do together, and how that ends.

::

    sent --> all have answered -------------------------------------------------------------+
      |                                                                                      +--> done
      +--> one has failed, ended, or is late --> the first step --> the next --> ... --> all answered or ended
      +--> the user interrupts ----------------> the step "interrupt" --> ...

A request ends early by a table of steps (`notebook.ranks.steps`). Each step acts on the ranks that have not
answered yet, and the next one follows after its deadline.

The methods run in the thread of the loop. Answers are unpickled later, in the thread that has asked and closes the
request, because users' code takes part in that.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nb_accelerate.base.topology.rank_lists import label
from nb_accelerate.notebook.protocol.messages import NOTHING, CellEnd, Failure, Parcel, Result
from nb_accelerate.notebook.ranks.failing.incidents import Incident, IncidentKind, first_cause, oom_kills, shortage_on
from nb_accelerate.notebook.ranks.input_requests import InputRequests
from nb_accelerate.notebook.ranks.start_watch import StartWatch
from nb_accelerate.notebook.ranks.steps import StepKind, ask_for_stacks, saves_in_background
from nb_accelerate.notebook.ranks.timeouts import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.notebook.display.panel import Panel
    from nb_accelerate.notebook.ranks.failing.incidents import Answer, Wording
    from nb_accelerate.notebook.ranks.output.request_output import RequestOutput
    from nb_accelerate.notebook.ranks.proxy import RankProxy
    from nb_accelerate.notebook.ranks.steps import Step
    from nb_accelerate.notebook.ranks.timeouts import Timeouts

logger = logging.getLogger(__name__)

# Seconds between two nudges of ranks that have not answered since they were interrupted; see `RankHandle.nudge`.
_NUDGE_INTERVAL = 0.15


class Awaits(enum.Enum):
    """What a request waits for, from each of its ranks."""

    READY = "`Ready`, when it is set up"
    ANSWER = "the answer to a message"
    END = "the end of its process"


@dataclass(eq=False, kw_only=True)
class Request:
    """Something that ranks are asked. `RankLoop.begin` begins it; it is over when `done` is set."""

    ranks: Sequence[RankProxy]
    send: Callable[[RankProxy], object]
    steps: Sequence[Step]
    wording: Wording
    awaits: Awaits = Awaits.ANSWER
    world_size: int = 1  # number of ranks in all; `ranks` may be fewer.
    # Seconds without progress after which ranks are given up that have not become ready; for a request that is itself
    # part of a start, ranks that have not answered.
    start: float = NEVER
    timeout: float | None = None  # seconds in which all ranks must answer; None for no limit.
    spent: float = 0.0  # seconds of these that were over before it began
    # Shows what all ranks print from its begin on, also after it; None leaves that as it is.
    output: RequestOutput | None = None
    say: Callable[[str], object] = lambda _: None
    # Of waits of ranks for one another: after ``told`` seconds one is told, after ``deadlock`` seconds in which nobody
    # is left to come the request fails with a `DeadlockError`. None turns both off.
    hangs: Timeouts | None = None
    # Called once, in the loop's thread, when all its ranks have waited for one another for ``told`` seconds.
    stuck: Callable[[], object] = lambda: None
    panel: Panel | None = None
    keeps_panel: bool = False  # whether the panel outlives the request; if not, it shows the end of the request
    on_host: bool = False  # whether its ranks compute on processors, and use no other devices
    # Returns ranks of the same process group that nothing is asked of meanwhile; for the loop's thread.
    idle: Callable[[], Sequence[RankProxy]] = tuple
    # Whether a rank whose process ends with exit code 0 has answered None. A script may do that, by ``os._exit(0)``,
    # where a function would lose its value.
    exit_returns: bool = False
    attended: bool = True
    # Whether its error is raised in the cell that shows its panel; if not, the panel shows the traceback.
    is_raised: bool = True
    # Called just before it is done, after `callbacks`. An error in it fails the request.
    on_end: Callable[[], object] = lambda: None
    answers: dict[int, Answer] = field(default_factory=dict)
    cell_ends: dict[int, CellEnd] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    failure: BaseException | None = None  # the error of the loop, if that has ended before the ranks have answered
    step: Step | None = None
    steps_taken: set[StepKind] = field(default_factory=set)  # kinds of the steps that have acted on a rank
    # Called just before it is done. An error in one is shown to the user or logged, and otherwise ignored.
    callbacks: list[Callable[[], object]] = field(default_factory=list)
    is_unwanted: bool = False
    oom_kills_before: int = 0
    input_requests: InputRequests = field(default_factory=InputRequests)
    # Set when every rank has answered or ended, or the loop has ended.
    done: threading.Event = field(default_factory=threading.Event)
    _step_ends: float = NEVER
    _again_at: float = NEVER
    _start: StartWatch | None = None
    _late_at: float = NEVER
    _ending_since: float = NEVER
    _told_of_save: bool = False
    # Whether ranks that do not react to the user's interrupt have yet to be asked for their stacks.
    _asks_where: bool = True
    # Ranks whose answer `take` has returned: the caller closes its descriptors.
    _given_away: set[int] = field(default_factory=set)
    _unasked: set[int] = field(default_factory=set)  # ranks to which the message could not be sent
    # Ranks that answered by themselves, not because of a signal or a lost rank. Their stacks are not shown.
    _unaided: set[int] = field(default_factory=set)

    # Its state.

    @property
    def waiting(self) -> list[RankProxy]:
        """Ranks that were asked and have neither answered nor ended."""
        return list(filter(self.waits_for, self.ranks))

    def waits_for(self, rank: RankProxy) -> bool:
        """Return whether one of its ranks was asked and has neither answered nor ended."""
        has_answered = rank.rank in self.answers and self.awaits is not Awaits.END
        return not (has_answered or rank.rank in self._unasked or rank.is_gone)

    @property
    def due(self) -> float:
        """`time.monotonic` at which `act` has something to do."""
        start = self._start.due if self._start is not None else NEVER
        return min(self._step_ends, self._again_at, start, self._late_at)

    @property
    def is_being_ended(self) -> bool:
        """Whether ranks were signalled. Failures and ends that are noticed afterwards are no causes."""
        return self.step is not None and self.step.kind > StepKind.ASK

    @property
    def was_interrupted(self) -> bool:
        return any(incident.kind is IncidentKind.INTERRUPTED for incident in self.incidents)

    @property
    def failed_rank(self) -> int | None:
        """The rank that failed first, or None."""
        failed = [incident for incident in self.incidents if incident.kind is IncidentKind.FAILED]
        first = first_cause(failed) if failed else None
        return first.rank.rank if first is not None and first.rank is not None else None

    @property
    def stacks(self) -> dict[int, str]:
        """Stacks of the ranks that were asked for them and have not answered by themselves since, by rank."""
        return {rank.rank: rank.dump for rank in self.ranks if rank.dump and rank.rank not in self._unaided}

    # Events.

    def begin(self) -> None:
        """Send the message to every rank."""
        for rank in self.ranks:
            if self.awaits is not Awaits.END:  # errors of a request that ends ranks show older stacks
                rank.stacks.clear()
            try:
                with contextlib.suppress(ConnectionError):  # it has just ended, which its status tells
                    self.send(rank)
            except Exception as error:
                self._unasked.add(rank.rank)
                self._add(Incident(kind=IncidentKind.UNASKED, when=time.monotonic(), rank=rank, error=error))
        for rank in self.ranks:
            if rank.is_gone:  # it has ended since it was chosen, and no event will follow
                self.ended(rank)
        now = time.monotonic()
        if self.timeout is not None:
            self._late_at = now + self.timeout - self.spent
        if self.start < NEVER and self.step is None:
            self._start = StartWatch(self.start, self._starting, self.say)
        if self.awaits is Awaits.END:
            self._enter(self.steps[0].kind)
        if self.is_unwanted:
            self.interrupt()

    def ready(self, rank: RankProxy) -> None:
        if self.awaits is Awaits.READY:
            self.answered(rank, Result(parcel=Parcel()), ())
        elif all(rank.is_ready for rank in self.ranks):
            self._start = None

    def answered(self, rank: RankProxy, message: Result | Failure | CellEnd, fds: tuple[int, ...]) -> None:
        """Note an answer. Its descriptors are taken over."""
        if isinstance(message, CellEnd):
            self.cell_ends[rank.rank] = message
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
                memory=shortage_on(rank, self.ranks, message.report),
            )
            self._add(incident, goes_on=message.returned)  # if only its value cannot be sent, the others may finish

    def ended(self, rank: RankProxy) -> None:
        """Note that the process of a rank has ended, or that it is of no use any more."""
        self.input_requests.gone(rank.rank)
        if self.awaits is Awaits.END or rank.rank in self.answers:
            return
        # It was told to end, so that its end is no incident.
        if self.step is not None and self.step.kind >= StepKind.TERMINATE:
            return
        if self.exit_returns and rank.is_ready and rank.handle.exitcode == 0:
            self.answered(rank, Result(parcel=NOTHING), ())
            return
        out_of_memory = oom_kills() > self.oom_kills_before
        was_killed_for_memory = out_of_memory and rank.handle.exitcode == -signal.SIGKILL
        incident = Incident(
            kind=IncidentKind.DIED,
            when=time.monotonic(),
            rank=rank,
            tail=rank.output.tail,
            is_consequence=self.is_being_ended,
            out_of_memory=out_of_memory,
            memory=shortage_on(rank, self.ranks) if was_killed_for_memory else "",
        )
        self._add(incident)

    def interrupt(self, kind: StepKind = StepKind.INTERRUPT, how: str = "interrupted") -> None:
        """End it early for the user, who has `how` it. A second time, go to the current step's `on_interrupt`."""
        again = self.was_interrupted
        self.input_requests.close()
        # `_add` would take the first step, but what the user asks for has a step of its own.
        self.incidents.append(Incident(kind=IncidentKind.INTERRUPTED, when=time.monotonic(), how=how))
        step = self.step
        if step is not None and step.on_interrupt is not None and (again or self.awaits is Awaits.END):
            self._enter(step.on_interrupt)
        elif step is None or step.kind < kind:
            self._enter(kind)

    def abandon(self, error: BaseException) -> None:
        """End it because its ranks cannot go on. The error, a reason outside them, is raised in the waiting thread."""
        self._add(Incident(kind=IncidentKind.ABANDONED, when=time.monotonic(), error=error))

    def act(self) -> None:
        """Go to the next step, note what is late, or nudge ranks, as is due."""
        now = time.monotonic()
        # Ranks were not ready, or have not answered, in time.
        if self._start is not None and now >= self._start.due and self._start.act():
            self._late_at, late = NEVER, tuple(rank.rank for rank in self._starting())
            self._add(Incident(kind=IncidentKind.NOT_STARTED, when=now, late=late, how=self._start.where()))
        if now >= self._late_at:
            self._late_at = NEVER
            self._add(Incident(kind=IncidentKind.LATE, when=now, late=tuple(rank.rank for rank in self.waiting)))
        if self.step is None:
            return
        # The time of the step is over; or, within it, ranks are asked once more what they have not heard.
        if now >= self._step_ends:
            if self._lacks_a_cause(now) or self._is_saving(now):
                self._step_ends = now + self.step.seconds
            else:
                self._enter(StepKind(self.step.kind + 1))
        elif now >= self._again_at:
            is_asking = self.step.kind is StepKind.ASK
            asks_where, self._asks_where = self._asks_where and self.was_interrupted, False
            self._again_at = NEVER if is_asking else now + _NUDGE_INTERVAL
            for rank in self.waiting:
                with contextlib.suppress(Exception):  # `_enter` has logged what cannot be done
                    if is_asking:  # once more: the first stacks may show it on its way to where it waits
                        ask_for_stacks(rank)
                    elif rank.is_ready:
                        rank.handle.nudge()
                        if asks_where:  # once: C code may never let it answer
                            ask_for_stacks(rank)

    # Its end.

    def finish(self) -> None:
        """Wake up the threads that wait for it."""
        self.done.set()
        self.input_requests.close()

    def fail(self, error: BaseException) -> None:
        """Note that the loop has ended, and wake up the waiting threads."""
        self.failure = error
        self.finish()

    def take(self, rank: int) -> Answer:
        """Return what a rank answered. Its descriptors are the caller's from then on."""
        self._given_away.add(rank)
        return self.answers[rank]

    def close(self) -> None:
        """Close the descriptors of answers that were not taken."""
        for rank in self.answers.keys() - self._given_away:
            for fd in self.take(rank)[1]:
                os.close(fd)

    # Inside.

    def _add(self, incident: Incident, *, goes_on: bool = False) -> None:
        self.incidents.append(incident)
        if self.step is None and not goes_on:
            self._enter(self.steps[0].kind)

    def _starting(self) -> list[RankProxy]:
        return [rank for rank in self.waiting if not rank.is_ready] or self.waiting

    def _lacks_a_cause(self, now: float) -> bool:
        """Return whether all failures only say that another rank was lost, and that rank's own is still waited for."""
        assert self.step is not None
        return (
            bool(self.incidents)
            and all(incident.peer_lost for incident in self.incidents)
            and now < self.incidents[0].when + self.step.cause
        )

    def _is_saving(self, now: float) -> bool:
        """Return whether to wait for ranks that write a checkpoint, and tell the user of it once."""
        # There is no wait after a timeout or a second interrupt, and none longer than `Step.save` seconds.
        assert self.step is not None
        if now >= self._ending_since + self.step.save:
            return False
        kinds = [incident.kind for incident in self.incidents]
        # The first interrupt asks ranks to end; one more, or one after a failure, not to wait.
        if kinds.count(IncidentKind.INTERRUPTED) > (kinds[:1] == [IncidentKind.INTERRUPTED]):
            return False
        if kinds[:1] == [IncidentKind.LATE]:
            return False
        if any(rank.is_gone and saves_in_background(rank.handle.page.read()) for rank in self.ranks):
            return False  # its part of the checkpoint will not come
        saving = [rank.rank for rank in self.waiting if self.step.is_saving(rank.handle.page.read())]
        if saving and not self._told_of_save:
            self._told_of_save = True
            again = "Interrupt once more" if self.was_interrupted else "Interrupt"
            self.say(f"{label(saving)} {'is' if len(saving) == 1 else 'are'} saving. {again} not to wait")
        return bool(saving)

    def _enter(self, kind: StepKind) -> None:
        self._start = None
        if self.step is None:
            self._ending_since = time.monotonic()
        step = self.step = next(step for step in self.steps if step.kind >= kind)
        seconds = step.for_user if step.for_user is not None and self.was_interrupted else step.seconds
        now = time.monotonic()
        self._step_ends = now + seconds
        again = {StepKind.ASK: seconds / 2, StepKind.INTERRUPT: _NUDGE_INTERVAL}
        self._again_at = now + again.get(step.kind, NEVER)
        waiting = self.waiting
        if waiting:
            self.steps_taken.add(step.kind)
        for rank in waiting:
            _try(step.take, rank)
        if step.answered is not None:
            for rank in self.ranks:
                if rank.rank in self.answers:
                    _try(step.answered, rank)
        if step.notice and waiting:
            cut_off = [rank for rank in waiting if rank.handle.is_slow()]
            for rank in cut_off:
                self.say(
                    f"the interrupt has not come to {rank.handle.machine} yet: its network is slow, or it is "
                    f"suspended. The cell ends on rank {rank.rank} when it has. Interrupt once more to kill the rank "
                    "and lose its variables"
                )
            if busy := [str(rank.rank) for rank in waiting if rank not in cut_off]:
                self.say(step.notice.format(ranks=", ".join(busy)))


def _try(act: Callable[[RankProxy], object], rank: RankProxy) -> None:
    try:
        act(rank)
    except Exception:  # the step goes on with the other ranks
        logger.warning("A step that ends a request early failed for rank %s.", rank.rank, exc_info=True)
