"""One thing that some ranks are asked to do together, and how it ends.

::

    asked --> all answered -------------------------------------------------------------+
      |                                                                                 +--> done
      +--> one failed, ended, or is late --> ASK --> INTERRUPT --> CUT --> WAIT --> KILL --> GIVE UP
      +--> the user interrupts --------------------> INTERRUPT ...

Each stage is for ranks that have not answered yet, and has its deadline: say where you are; KeyboardInterrupt in
users' code; connections to other ranks broken, for those that wait in a collective. A rank that is busy in C code
answers when that returns. In a cell it is never killed unless the user asks for it: its variables would be lost. New
ranks have none, and are killed instead of interrupted.

All of this runs in the pool's thread. What ranks answered is unpickled later, by whoever asked and closes the turn.
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

from nb_accelerate.diagnostics.stacks import DUMP_SIGNAL
from nb_accelerate.launch.local import NUDGE_AFTER
from nb_accelerate.protocol.messages import CellEnd, CutOff, Failure
from nb_accelerate.ranks.input_requests import Questions
from nb_accelerate.worker.ends import NUDGE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from nb_accelerate.protocol.messages import Result
    from nb_accelerate.ranks.proxy import Member

    Answer = tuple[Result | Failure, tuple[int, ...]]

logger = logging.getLogger(__name__)

_NEVER = float("inf")


class Stage(enum.IntEnum):
    """How far the ending of a turn before its time has come."""

    ASK = 0
    INTERRUPT = 1
    CUT = 2
    WAIT = 3
    KILL = 4
    GIVE_UP = 5


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds for each stage.

    Attributes:
        ask: for stacks, and for failures that other ranks are about to report; the earliest is the cause.
        interrupt: for users' code to react to KeyboardInterrupt.
        cut: for a collective to fail after its connections were broken.
        wait: for C code to return; then the rank is killed.
        kill: for a killed process to end; then it counts as lost, whatever keeps it.
    """

    ask: float = 0.2
    interrupt: float = 0.4
    cut: float = 2.0
    wait: float = _NEVER
    kill: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something that ends a turn. A failure is rebuilt as an exception later, in the thread that asked.

    Attributes:
        kind: ``failed``, ``died``, ``unasked``, ``late`` or ``interrupted``.
        when: `time.monotonic`.
        member: whose, or None.
        failure: what it answered, and the descriptors of it.
        error: why it could not be asked.
        tail: its last output.
        late: who had not answered in time.
    """

    kind: str
    when: float
    member: Member | None = None
    failure: tuple[Failure, tuple[int, ...]] | None = None
    error: BaseException | None = None
    tail: str = ""
    late: tuple[int, ...] = ()


@dataclass
class Turn:
    """Ask with `begin`; afterwards events come in, until `done` is set.

    Attributes:
        members: who is asked.
        send: asks one of them.
        fellows: process ids of all ranks, to break their connections.
        meeting: number of the meeting in which they made them, or are about to.
        world_size: number of all ranks.
        what: it is, for an error about its time.
        timeout: seconds, or None.
        expendable: numbers of ranks that are killed if they do not answer: they are new, and have nothing to lose.
        sent: names that went along, by rank.
        say: takes a line for the user.
        answers: by rank.
        ends: of cells, by rank.
        troubles: what went wrong, as it came.
        failure: why it is done although not everybody has answered: the pool itself has ended.
        was_cut: connections were broken, so the process group is of no use any more.
        callbacks: called in the pool's thread just before it is done.
        attended: somebody waits for it, and can be asked.
        is_unwanted: it was interrupted before it has begun.
        questions: of debuggers on ranks.
        done: everybody has answered or has ended.
    """

    members: Sequence[Member]
    send: Callable[[Member], None]
    fellows: Sequence[int] = ()
    meeting: int = 0
    world_size: int = 1
    what: str = "the cell"
    timeout: float | None = None
    expendable: Collection[int] = ()
    sent: dict[int, tuple[str, ...]] = field(default_factory=dict)
    say: Callable[[str], None] = lambda _: None
    patience: Patience = field(default_factory=Patience)
    answers: dict[int, Answer] = field(default_factory=dict)
    ends: dict[int, CellEnd] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)
    failure: BaseException | None = None
    was_cut: bool = False
    callbacks: list[Callable[[], None]] = field(default_factory=list)
    attended: bool = True
    is_unwanted: bool = False
    questions: Questions = field(default_factory=Questions)
    done: threading.Event = field(default_factory=threading.Event)
    stage: Stage | None = None
    _stage_ends: float = _NEVER
    _again_at: float = _NEVER
    _late_at: float = _NEVER
    _taken: set[int] = field(default_factory=set)
    _unasked: set[int] = field(default_factory=set)
    _unaided: set[int] = field(default_factory=set)
    """Ranks that came to the end by themselves: where they were on the way there explains nothing."""

    @property
    def waiting(self) -> list[Member]:
        """Who was asked, and has neither answered nor ended."""
        done = self.answers.keys() | self._unasked
        return [one for one in self.members if one.rank not in done and not one.is_gone]

    @property
    def due(self) -> float:
        """When `act` has something to do."""
        return min(self._stage_ends, self._again_at, self._late_at)

    @property
    def failed_rank(self) -> int | None:
        """Whose failure came first, if any failed; not one that only lost another rank."""
        failed = [one for one in self.troubles if one.member is not None and one.failure is not None]
        failed.sort(key=lambda one: (one.failure is not None and one.failure[0].peer_lost, one.when))
        return failed[0].member.rank if failed and failed[0].member is not None else None

    @property
    def stacks(self) -> Mapping[int, str]:
        """What ranks were doing when they were asked, and did not come out of by themselves."""
        return {
            one.rank: bytes(one.stacks).decode(errors="replace")
            for one in self.members
            if one.stacks and one.rank not in self._unaided
        }

    def begin(self) -> None:
        """Ask everybody."""
        for member in self.members:
            member.stacks.clear()
            try:
                self.send(member)
            except Exception as error:
                self._unasked.add(member.rank)
                self._trouble(Trouble(kind="unasked", when=time.monotonic(), member=member, error=error))
        for member in self.members:
            if member.is_gone:  # since it was chosen; nobody will tell of it any more
                self.ended(member)
        if self.timeout is not None:
            self._late_at = time.monotonic() + self.timeout
        if self.is_unwanted:
            self.interrupt()

    def answered(self, member: Member, message: Result | Failure | CellEnd, fds: tuple[int, ...]) -> None:
        """A rank answered."""
        if isinstance(message, CellEnd):
            self.ends[member.rank] = message
            member.steps = message.steps
            message = message.answer
        self.answers[member.rank] = (message, fds)
        self.questions.gone(member.rank)
        if self._is_our_doing():
            return
        if not (isinstance(message, Failure) and message.peer_lost):
            self._unaided.add(member.rank)
        if isinstance(message, Failure):
            self._trouble(
                Trouble(
                    kind="failed", when=message.when, member=member, failure=(message, fds), tail=member.output.tail
                )
            )

    def ended(self, member: Member) -> None:
        """A rank's process has ended."""
        self.questions.gone(member.rank)
        if member.rank not in self.answers and (self.stage is None or self.stage < Stage.KILL):
            self._trouble(Trouble(kind="died", when=time.monotonic(), member=member, tail=member.output.tail))

    def finish(self) -> None:
        """Everybody has answered: let go of who waits."""
        self.done.set()
        self.questions.close()

    def take(self, rank: int) -> Answer:
        """What a rank answered; its descriptors are then the caller's."""
        self._taken.add(rank)
        return self.answers[rank]

    def close(self) -> None:
        """Close descriptors of answers that nobody took."""
        for rank in self.answers.keys() - self._taken:
            for fd in self.take(rank)[1]:
                os.close(fd)

    def fail(self, error: BaseException) -> None:
        """The pool has ended: nobody will answer any more."""
        self.failure = error
        self.finish()

    def interrupt(self) -> None:
        """The user does not want to wait any longer; a second time, not for those that cannot be interrupted."""
        again = any(trouble.kind == "interrupted" for trouble in self.troubles)
        self.troubles.append(Trouble(kind="interrupted", when=time.monotonic()))
        if self.stage is None or self.stage < Stage.INTERRUPT:
            self._enter(Stage.INTERRUPT)
        elif again and self.stage is Stage.WAIT:
            self._enter(Stage.KILL)

    def act(self) -> None:
        """A deadline has come."""
        now = time.monotonic()
        if now >= self._late_at:
            self._late_at = _NEVER
            self._trouble(Trouble(kind="late", when=now, late=tuple(one.rank for one in self.waiting)))
        if now >= self._stage_ends and self.stage is not None:
            self._enter(Stage(self.stage + 1))
        elif now >= self._again_at:
            self._again_at = _NEVER if self.stage is Stage.ASK else now + NUDGE_AFTER
            for member in self.waiting:
                with contextlib.suppress(Exception):  # it has been tried before
                    if self.stage is Stage.ASK:  # by now it is where it waits, and not on the way there
                        member.stacks.clear()
                        member.handle.signal(DUMP_SIGNAL)
                    elif member.rank in self.expendable and member.handle.is_lost(is_to_end=True):
                        member.handle.give_up()
                        member.why_lost = member.handle.lost
                        self.ended(member)
                    elif self.stage is Stage.INTERRUPT:
                        member.handle.signal(NUDGE)

    def _is_our_doing(self) -> bool:
        return self.stage is not None and self.stage >= Stage.INTERRUPT

    def _trouble(self, trouble: Trouble) -> None:
        self.troubles.append(trouble)
        if self.stage is None:
            self._enter(Stage.ASK)

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        patience = {
            Stage.ASK: self.patience.ask,
            Stage.INTERRUPT: self.patience.interrupt,
            Stage.CUT: self.patience.cut,
            Stage.WAIT: self.patience.wait,
            Stage.KILL: self.patience.kill,
        }
        now = time.monotonic()
        self._stage_ends = now + patience.get(stage, _NEVER)
        again = {Stage.ASK: self.patience.ask / 2, Stage.INTERRUPT: NUDGE_AFTER}
        # Who starts new ranks may not answer: then nobody tells of their ends, and it has to be looked for.
        self._again_at = now + again.get(stage, NUDGE_AFTER if self.expendable else _NEVER)
        waiting = self.waiting
        self.was_cut = self.was_cut or (stage is Stage.CUT and bool(waiting))
        for member in waiting:
            try:
                self._urge(member, stage)
            except Exception:  # what cannot be sent to one rank keeps nothing from those that follow
                logger.warning("Rank %s could not be told to end.", member.rank, exc_info=True)
        if stage is Stage.WAIT and waiting and self.patience.wait == _NEVER:
            ranks = ", ".join(str(member.rank) for member in waiting)
            self.say(
                f"rank {ranks} is busy where it cannot be interrupted; this cell ends when that does. Interrupt once "
                f"more to kill it: its variables are then lost"
            )

    def _urge(self, member: Member, stage: Stage) -> None:
        if stage is Stage.ASK:
            member.handle.signal(DUMP_SIGNAL)
        elif stage is Stage.KILL or (stage is Stage.INTERRUPT and member.rank in self.expendable):
            member.handle.signal(signal.SIGKILL)
        elif stage is Stage.INTERRUPT:
            member.handle.announce_interrupt()
            member.handle.signal(signal.SIGINT)
        elif stage is Stage.CUT:
            fellows = tuple(one for one in self.fellows if one != member.handle.pid)
            member.cut_off(CutOff(meeting=self.meeting, fellows=fellows))
        elif stage is Stage.GIVE_UP:
            member.why_lost = member.why_lost or "its process did not end when it was killed"
            self.ended(member)
