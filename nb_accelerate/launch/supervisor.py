"""Waits for everything that can happen in a launch, in one place, and decides how it ends.

::

    channel  --> Ready, Result, Failure --+
    stdout, stderr --> lines to the cell  |
    stacks   --> where each rank is       +--> one selector --> running --> all answered --> Quit --> answers
    status   --> exit code, signal        |                        |
    wake     --> interrupt, stop ---------+                        +--> stopping --> the first cause, raised
    deadlines ----------------------------+

Stopping goes through stages, each with its deadline: ask every rank where it is (after a failure), interrupt
users' code, terminate, kill. A rank that answers or ends leaves the procedure early, and nothing waits for a
deadline once every rank has ended.

What fails in showing output costs output (`Router`). A rank whose messages cannot be read ends the launch: its answer
may have been among them.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from nb_accelerate.diagnostics.stacks import DUMP_SIGNAL, STOPPED
from nb_accelerate.display import Action, Seen
from nb_accelerate.launch.local import NUDGE_AFTER
from nb_accelerate.launch.owner import Watch
from nb_accelerate.protocol.messages import Failure, Quit, Ready, Result
from nb_accelerate.ranks.failures import (
    Incident,
    Interrupted,
    Overdue,
    add_note,
    died,
    failed,
    first_cause,
    unreadable,
)
from nb_accelerate.ranks.memory import oom_kills
from nb_accelerate.ranks.sources import Sources
from nb_accelerate.worker.ends import NUDGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nb_accelerate.display import Panel
    from nb_accelerate.launch.local import RankHandle
    from nb_accelerate.launch.router import Router
    from nb_accelerate.ranks.output import RankOutput

logger = logging.getLogger(__name__)

_INTERRUPT, _STOP = b"i", b"s"

_GLANCE = 0.1
"""Seconds between two looks at the processes of a launch that is being ended."""


class Stage(enum.IntEnum):
    """How far the stopping of a launch has come."""

    ASK = 0
    INTERRUPT = 1
    TERMINATE = 2
    KILL = 3


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds that each thing may take.

    Attributes:
        start: until every rank is ready; importing torch from a slow disk is the longest part of it.
        quit: from `Quit` until a rank has ended: exit handlers of users and libraries run in it.
        ask: for the stacks of ranks after a failure. Other ranks' failures that arrive within it are compared, and
            the earliest wins.
        cause: for the end of the rank that others have lost: it is told once its process is cleaned up.
        interrupt: for users' code to react to KeyboardInterrupt, when the user interrupts.
        unwind: the same after a failure: ranks are then most often stuck in a collective and cannot react.
        terminate: from SIGTERM to SIGKILL.
    """

    start: float = 120.0
    quit: float = 10.0
    ask: float = 0.3
    cause: float = 5.0
    interrupt: float = 1.0
    unwind: float = 0.4
    terminate: float = 0.4


@dataclass
class _Rank:
    """A rank, and what is known of it; ``unaided``: it came to its end by itself."""

    handle: RankHandle
    output: RankOutput
    ready: bool = False
    answer: tuple[Result | Failure, tuple[int, ...]] | None = None
    stacks: bytearray = field(default_factory=bytearray)
    told_to_quit: bool = False
    stopped: bool = False
    unaided: bool = False


def _state(rank: _Rank) -> str:
    if rank.stopped:
        return "stopped"
    if rank.answer is not None:
        return "returned" if isinstance(rank.answer[0], Result) else "failed"
    if rank.handle.ended:
        return "ended"
    return "running" if rank.ready else "starting"


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


class Supervisor:
    """One attempt of a launch, from ranks that have been started to an outcome. `run` it once, then `close` it.

    Args:
        handles: the ranks.
        router: takes what they print.
        world_size: number of ranks on all machines.
        timeout: seconds from the moment all are ready.
        monitor_interval: seconds between two looks for ranks that were stopped.
        patience: seconds that each step of an end may take.
    """

    def __init__(
        self,
        handles: Sequence[RankHandle],
        router: Router,
        *,
        world_size: int,
        timeout: float | None = None,
        monitor_interval: float = 0.1,
        patience: Patience | None = None,
    ) -> None:
        self._patience = patience or Patience()
        self._world_size = world_size
        self._timeout = timeout
        self._router = router
        self.panel: Panel | None = None
        self._monitor_interval = monitor_interval
        self._monitor_at = time.monotonic() + monitor_interval
        self._ranks = [_Rank(handle, output) for handle, output in zip(handles, router.outputs, strict=True)]
        self._sources = Sources(self._on_bell)
        self._servers = Watch(router.say)
        self._stage: Stage | None = None
        self._stage_ends = float("inf")
        self._again_at = float("inf")
        self._overdue_at = float("inf")
        self._start_ends = time.monotonic() + self._patience.start
        self._quit_ends = float("inf")
        self._incidents: list[Incident] = []
        self._oom_kills = oom_kills()
        for rank in self._ranks:
            for source, action in (
                (rank.handle.channel, self._on_channel),
                (rank.handle.stdout, self._on_stdout),
                (rank.handle.stderr, self._on_stderr),
                (rank.handle.stacks, self._on_stacks),
                (rank.handle.status, self._on_status),
            ):
                self._sources.add(source, functools.partial(action, rank))

    def interrupt(self) -> None:
        """Stop the launch as if the user had interrupted the cell; a second time, kill it. Any thread."""
        self._sources.ring(_INTERRUPT)

    def stop(self) -> None:
        """Terminate every rank without asking its code. Any thread."""
        self._sources.ring(_STOP)

    def states(self) -> list[str]:
        """By rank: ``starting``, ``running``, ``returned``, ``failed``, ``stopped`` or ``ended``."""
        return [_state(rank) for rank in self._ranks]

    # For the panel.

    def look(self) -> list[Seen]:
        """The ranks as they are now."""
        return [
            Seen(rank=rank.handle.rank, sample=rank.handle.board.read(), state=_state(rank), pid=rank.handle.pid)
            for rank in self._ranks
        ]

    def ask(self) -> None:
        """Ask the ranks that run where they are. Any thread."""
        for rank in self._ranks:
            if rank.ready and rank.answer is None and not rank.stopped and self._stage is None:
                rank.stacks.clear()
                rank.handle.signal(DUMP_SIGNAL)

    def stacks(self) -> dict[int, str]:
        """What they answered."""
        return self._whereabouts()

    def log(self, rank: int) -> str:
        """The last lines a rank printed."""
        return next(one.output.text for one in self._ranks if one.handle.rank == rank)

    def runs(self) -> list[str]:
        """Runs that the ranks have logged values of."""
        return [run for rank in self._ranks for run in rank.output.logged]

    def actions(self) -> tuple[Action, ...]:
        """What the user can do."""
        return (
            Action("Interrupt", "raise KeyboardInterrupt in every rank", self.interrupt),
            Action("Stop", "end every rank now", self.stop),
        )

    # The wait.

    def run(self) -> dict[int, tuple[Result, tuple[int, ...]]]:
        """Wait until every rank has ended.

        Returns:
            What `results` gives, for all ranks.

        Raises:
            KeyboardInterrupt: the launch was interrupted.
            BaseException: the first cause of a failure, see `nb_accelerate.ranks.failures`.
        """
        with self._interrupts_come_here():
            while not all(rank.handle.ended for rank in self._ranks):
                self._act_on_deadlines()
                self._sources.wait(self._next_deadline() - time.monotonic())
        for rank in self._ranks:
            self._read_rest(rank)
        self._router.finish()
        if self._incidents:
            error = first_cause(self._incidents, self._world_size, self._whereabouts())
            add_note(error, self._servers.note())
            raise error
        return self.results()

    def results(self) -> dict[int, tuple[Result, tuple[int, ...]]]:
        """Answers of the ranks that have returned, by rank, and the descriptors that came with them.

        Ask once: the descriptors are then the caller's.
        """
        found = {}
        for rank in self._ranks:
            if rank.answer is not None and isinstance(rank.answer[0], Result):
                found[rank.handle.rank] = (rank.answer[0], rank.answer[1])
        return found

    def close(self) -> None:
        """Let go of what this waits with. The handles are their owner's."""
        self._sources.close()

    # What can happen.

    def _on_channel(self, rank: _Rank) -> None:
        try:
            messages, is_open = rank.handle.channel.drain()
        except Exception as error:
            self._sources.drop(rank.handle.channel)
            self._stop(unreadable(rank.handle, error))
            return
        for message, fds in messages:
            if isinstance(message, Ready):
                rank.ready = True
                rank.handle.pid = message.pid
                self._when_ready()
            elif isinstance(message, (Result, Failure)):
                rank.answer = (message, fds)
                self._when_answered(rank, message, fds)
        if not is_open:
            self._sources.drop(rank.handle.channel)

    def _on_stdout(self, rank: _Rank) -> None:
        self._router.feed(rank.output, self._read(rank.handle.stdout))

    def _on_stderr(self, rank: _Rank) -> None:
        self._router.feed_stderr(rank.output, self._read(rank.handle.stderr))

    def _on_stacks(self, rank: _Rank) -> None:
        rank.stacks += self._read(rank.handle.stacks)

    def _read(self, fd: int) -> bytes:
        try:
            return self._sources.read(fd)
        except OSError as error:
            logger.warning("What a rank prints cannot be read any more: %s", error)
            self._sources.drop(fd)
            return b""

    def _on_status(self, rank: _Rank) -> None:
        self._read_rest(rank)  # what it wrote last belongs to the story of its end
        self._sources.drop(rank.handle.status)
        try:
            rank.handle.read_status()
        except OSError:  # it has ended all the same, nobody knows how
            rank.handle.ended = True
        self._on_end(rank)

    def _on_end(self, rank: _Rank) -> None:
        if rank.answer is None and not self._signals_were_sent():
            ran_out = oom_kills() > self._oom_kills
            self._stop(died(rank.handle, rank.output.tail, started=rank.ready, out_of_memory=ran_out))

    def _on_bell(self, asked: bytes) -> None:
        was_stopping = any(isinstance(incident.error, Interrupted) for incident in self._incidents)
        how = "stopped" if _STOP in asked else "interrupted"
        self._incidents.append(Incident(error=Interrupted(how), when=time.monotonic()))
        if was_stopping or asked.count(_INTERRUPT) > 1:
            self._enter(Stage.KILL)
        elif _STOP in asked:
            self._enter(Stage.TERMINATE)
        elif self._stage is None or self._stage < Stage.INTERRUPT:
            self._enter(Stage.INTERRUPT)

    def _read_rest(self, rank: _Rank) -> None:
        """Whatever is left in a rank's pipes, without waiting for an end that a stray child may hold back."""
        handle = rank.handle
        for fd, take in (
            (handle.stdout, functools.partial(self._router.feed, rank.output)),
            (handle.stderr, functools.partial(self._router.feed_stderr, rank.output)),
            (handle.stacks, rank.stacks.extend),
        ):
            while fd in self._sources and (data := self._read(fd)):
                take(data)
        if handle.channel in self._sources:
            self._on_channel(rank)
        if handle.ended:
            self._router.end(rank.output)

    # What follows from it.

    def _when_ready(self) -> None:
        if all(rank.ready for rank in self._ranks):
            self._start_ends = float("inf")
            if self._timeout is not None:
                self._overdue_at = time.monotonic() + self._timeout

    def _when_answered(self, rank: _Rank, message: Result | Failure, fds: tuple[int, ...]) -> None:
        rank.unaided = not self._signals_were_sent() and not (isinstance(message, Failure) and message.peer_lost)
        if isinstance(message, Failure) and not self._signals_were_sent():
            incident = failed(rank.handle, message, fds, rank.output.tail)
            if message.returned:
                self._incidents.append(incident)  # the others may finish: their values can travel
            else:
                self._stop(incident)
        if self._stage is not None:
            if self._signals_were_sent():
                self._let_go(rank)
        elif all(rank.answer for rank in self._ranks):
            self._quit_ends = time.monotonic() + self._patience.quit
            for one in self._ranks:
                self._let_go(one)

    def _let_go(self, rank: _Rank) -> None:
        if not rank.told_to_quit:
            rank.told_to_quit = True
            with contextlib.suppress(OSError):  # it has ended by itself
                rank.handle.channel.send(Quit())

    def _stop(self, incident: Incident) -> None:
        self._look_for_stopped_ranks()
        self._incidents.append(incident)
        if self._stage is None:
            self._enter(Stage.ASK)

    def _nobody_is_left_to_ask(self) -> bool:
        """Every rank has answered or ended, so that no earlier cause and no stacks can come any more."""
        return self._stage is Stage.ASK and all(rank.answer or rank.handle.ended for rank in self._ranks)

    def _lacks_a_cause(self, now: float) -> bool:
        """All that is known is that ranks have lost another one, and that one has not been heard of yet."""
        return (
            self._stage is Stage.ASK
            and not self._nobody_is_left_to_ask()
            and all(incident.peer_lost for incident in self._incidents)
            and now < self._incidents[0].when + self._patience.cause
        )

    def _signals_were_sent(self) -> bool:
        """From then on what ranks report, and how they end, is our doing and no cause."""
        return self._stage is not None and self._stage >= Stage.INTERRUPT

    def _enter(self, stage: Stage) -> None:
        self._stage = stage
        interrupted = any(isinstance(incident.error, Interrupted) for incident in self._incidents)
        grace = {
            Stage.ASK: self._patience.ask,
            Stage.INTERRUPT: self._patience.interrupt if interrupted else self._patience.unwind,
            Stage.TERMINATE: self._patience.terminate,
            Stage.KILL: float("inf"),
        }[stage]
        now = time.monotonic()
        self._stage_ends = now + grace
        self._monitor_at = min(self._monitor_at, now + _GLANCE)
        again = {Stage.ASK: self._patience.ask / 2, Stage.INTERRUPT: NUDGE_AFTER}
        self._again_at = now + again.get(stage, float("inf"))
        for rank in self._ranks:
            if rank.handle.ended:
                continue
            if stage is Stage.ASK:
                if rank.ready and rank.answer is None:
                    rank.handle.signal(DUMP_SIGNAL)
            elif stage is Stage.INTERRUPT and rank.answer is not None:
                self._let_go(rank)
            elif stage is Stage.INTERRUPT:
                rank.handle.announce_interrupt()
                rank.handle.signal(signal.SIGINT)
                if not rank.ready:  # it may be long in coming, and there is nothing to wait for
                    self._let_go(rank)
            else:
                rank.handle.signal(signal.SIGTERM if stage is Stage.TERMINATE else signal.SIGKILL)

    def _act_on_deadlines(self) -> None:
        if self._next_deadline() > time.monotonic() and not self._nobody_is_left_to_ask():
            return
        # What has come by now is not late, however long this thread was kept from reading it.
        self._sources.wait(0.0)
        now = time.monotonic()
        if now >= min(self._start_ends, self._overdue_at):
            starting = self._start_ends <= now
            late = tuple(r.handle.rank for r in self._ranks if not (r.ready if starting else r.answer))
            seconds = self._patience.start if starting else self._timeout or 0.0
            self._start_ends = self._overdue_at = float("inf")
            self._stop(Incident(error=Overdue(seconds=seconds, ranks=late, starting=starting), when=now))
        if now >= self._quit_ends:
            # They have answered; what they do on leaving is not worth an error, only an end.
            self._quit_ends = float("inf")
            self._enter(Stage.TERMINATE)
        if self._stage is not None and (now >= self._stage_ends or self._nobody_is_left_to_ask()):
            if self._lacks_a_cause(now):
                self._stage_ends = now + self._patience.ask
            else:
                self._enter(Stage(self._stage + 1))
        elif now >= self._again_at:
            self._again_at = float("inf") if self._stage is Stage.ASK else now + NUDGE_AFTER
            for rank in self._ranks:
                if rank.ready and rank.answer is None:
                    if self._stage is Stage.ASK:  # by now it is where it waits, and not on the way there
                        rank.stacks.clear()
                        rank.handle.signal(DUMP_SIGNAL)
                    else:
                        rank.handle.signal(NUDGE)
        if now >= self._router.due:
            self._router.flush()
        if self.panel is not None and now >= self.panel.due:
            self.panel.refresh()
        if now >= self._monitor_at:
            interval = self._monitor_interval if self._stage is None else min(_GLANCE, self._monitor_interval)
            self._monitor_at = now + interval
            self._look_for_stopped_ranks()
            self._give_up_lost_ranks()

    def _next_deadline(self) -> float:
        stopping = min(self._start_ends, self._overdue_at, self._quit_ends, self._stage_ends, self._again_at)
        panel = self.panel.due if self.panel is not None else float("inf")
        return min(stopping, self._router.due, self._monitor_at, panel)

    def _look_for_stopped_ranks(self) -> None:
        """A process that was stopped (SIGSTOP) sends no event to anyone but its parent; so we look."""
        for rank in self._ranks:
            if rank.handle.ended or rank.handle.pid is None or self._signals_were_sent():
                continue
            stopped = _is_stopped(rank.handle.pid)
            if stopped and not rank.stopped:
                pid = rank.handle.pid
                self._say(f"rank {rank.handle.rank} is stopped (SIGSTOP). To let it go on: kill -CONT {pid}")
            elif rank.stopped and not stopped:
                self._say(f"rank {rank.handle.rank} goes on")
            rank.stopped = stopped

    def _give_up_lost_ranks(self) -> None:
        """A server that was stopped, or is still importing, tells of nothing; see `nb_accelerate.launch.owner`."""
        self._servers.look({one.handle.owner for one in self._ranks if one.handle.owner and not one.handle.ended})
        for rank in self._ranks:
            nobody_waits = self._stage is Stage.KILL or (self._signals_were_sent() and not rank.ready)
            if rank.handle.is_lost(is_to_end=nobody_waits):
                rank.handle.give_up()
                self._on_end(rank)

    def _say(self, line: str) -> None:
        if self.panel is None:  # else it says so
            self._router.say(line)

    def _whereabouts(self) -> dict[int, str]:
        return {
            rank.handle.rank: STOPPED if rank.stopped else bytes(rank.stacks).decode(errors="replace")
            for rank in self._ranks
            if (rank.stacks or rank.stopped) and not rank.unaided
        }

    @contextlib.contextmanager
    def _interrupts_come_here(self) -> Iterator[None]:
        """While the main thread waits, SIGINT is an event like the others and not an exception anywhere."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGINT, lambda *_: self.interrupt())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
