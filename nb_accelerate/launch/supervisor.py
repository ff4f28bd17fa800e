"""Waits for everything that can happen in a launch, in one place, and decides how it ends.

::

    channel  --> Ready, Result, Failure --+
    stdout, stderr --> lines to the cell  |
    stacks   --> where each rank is       +--> one selector --> running --> all answered --> Quit --> values
    status   --> exit code, signal        |                        |
    wake     --> interrupt (SIGINT) ------+                        +--> stopping --> the first cause, raised
    deadlines ----------------------------+

Stopping goes through stages, each with its deadline: ask every rank where it is (after a failure), interrupt
users' code, terminate, kill. A rank that answers or ends leaves the procedure early, and nothing waits for a
deadline once every rank has ended.
"""

from __future__ import annotations

import contextlib
import enum
import os
import selectors
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nb_accelerate.diagnostics.stacks import DUMP_SIGNAL
from nb_accelerate.launch.incidents import Incident, Interrupted, Overdue, died, failed, first_cause
from nb_accelerate.launch.output import RankOutput
from nb_accelerate.protocol.messages import Call, Failure, Quit, Ready, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nb_accelerate.launch.handle import RankHandle
    from nb_accelerate.launch.output import Sink
    from nb_accelerate.protocol.shipping import Packed

_CHUNK = 1 << 16


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
        interrupt: for users' code to react to KeyboardInterrupt, when the user interrupts.
        unwind: the same after a failure: ranks are then most often stuck in a collective and cannot react.
        terminate: from SIGTERM to SIGKILL.
    """

    start: float = 120.0
    quit: float = 10.0
    ask: float = 0.3
    interrupt: float = 1.0
    unwind: float = 0.4
    terminate: float = 0.4


@dataclass
class _Rank:
    handle: RankHandle
    output: RankOutput
    ready: bool = False
    answer: tuple[Result | Failure, tuple[int, ...]] | None = None
    stacks: bytearray = field(default_factory=bytearray)
    told_to_quit: bool = False


class Supervisor:
    """One launch, from ranks that have been started to an outcome.

    Use it once: ``with Supervisor(...) as supervisor: answers = supervisor.run()``.
    """

    def __init__(
        self,
        handles: Sequence[RankHandle],
        call: Packed,
        sink: Sink,
        *,
        timeout: float | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._patience = patience or Patience()
        self._call = call
        self._timeout = timeout
        self._ranks = [_Rank(h, RankOutput(h.mark, sink, alone=len(handles) == 1)) for h in handles]
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._stage: Stage | None = None
        self._stage_ends = float("inf")
        self._overdue_at = float("inf")
        self._start_ends = time.monotonic() + self._patience.start
        self._quit_ends = float("inf")
        self._incidents: list[Incident] = []
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        for rank in self._ranks:
            for source, action in (
                (rank.handle.channel, self._on_channel),
                (rank.handle.stdout, self._on_stdout),
                (rank.handle.stderr, self._on_stderr),
                (rank.handle.stacks, self._on_stacks),
                (rank.handle.status, self._on_status),
            ):
                self._selector.register(source, selectors.EVENT_READ, (action, rank))

    def interrupt(self) -> None:
        """Stop the launch as if the user had interrupted the cell; a second time, kill it. Any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def run(self) -> list[tuple[Result, tuple[int, ...]]]:
        """Wait until every rank has ended.

        Returns:
            The answers by rank, and the descriptors that came with them, which are the caller's.

        Raises:
            KeyboardInterrupt: the launch was interrupted.
            BaseException: the first cause of a failure, see `nb_accelerate.launch.incidents`.
        """
        with self._interrupts_come_here():
            while not all(rank.handle.ended for rank in self._ranks):
                self._act_on_deadlines()
                wait = max(0.0, self._next_deadline() - time.monotonic())
                for key, _ in self._selector.select(wait if wait < 1e6 else None):
                    if key.data == self._on_wake:
                        self._on_wake()
                    else:
                        action, rank = key.data
                        action(rank)
        for rank in self._ranks:
            self._read_rest(rank)
        if self._incidents:
            raise first_cause(self._incidents, len(self._ranks), self._whereabouts())
        return [rank.answer for rank in self._ranks if rank.answer and isinstance(rank.answer[0], Result)]  # type: ignore[misc]

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        for rank in self._ranks:
            rank.handle.close()

    # What can happen.

    def _on_channel(self, rank: _Rank) -> None:
        messages, is_open = rank.handle.channel.drain()
        for message, fds in messages:
            if isinstance(message, Ready):
                rank.ready = True
                rank.handle.pid = message.pid
                self._when_ready(rank)
            elif isinstance(message, (Result, Failure)):
                rank.answer = (message, fds)
                self._when_answered(rank, message, fds)
        if not is_open:
            self._selector.unregister(rank.handle.channel)

    def _on_stdout(self, rank: _Rank) -> None:
        rank.output.feed(self._read(rank.handle.stdout))

    def _on_stderr(self, rank: _Rank) -> None:
        rank.output.feed_stderr(self._read(rank.handle.stderr))

    def _on_stacks(self, rank: _Rank) -> None:
        rank.stacks += self._read(rank.handle.stacks)

    def _on_status(self, rank: _Rank) -> None:
        self._read_rest(rank)  # what it wrote last belongs to the story of its end
        self._selector.unregister(rank.handle.status)
        rank.handle.read_status()
        if rank.answer is None and not self._signals_were_sent():
            self._stop(died(rank.handle, rank.output.tail, started=rank.ready))

    def _on_wake(self) -> None:
        presses = len(os.read(self._wake_read, 64))
        was_stopping = any(isinstance(incident.error, Interrupted) for incident in self._incidents)
        self._incidents.append(Incident(error=Interrupted(), when=time.monotonic()))
        if was_stopping or presses > 1:
            self._enter(Stage.KILL)
        elif self._stage is None or self._stage < Stage.INTERRUPT:
            self._enter(Stage.INTERRUPT)

    def _read(self, fd: int) -> bytes:
        """What is there; at the end of the stream, stop watching it."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return b""
        if not data:
            self._selector.unregister(fd)
        return data

    def _read_rest(self, rank: _Rank) -> None:
        """Whatever is left in a rank's pipes, without waiting for an end that a stray child may hold back."""
        handle = rank.handle
        sources: list[tuple[int, Callable[[_Rank], None]]] = [
            (handle.stdout, self._on_stdout),
            (handle.stderr, self._on_stderr),
            (handle.stacks, self._on_stacks),
        ]
        for fd, action in sources:
            with selectors.DefaultSelector() as poll:
                poll.register(fd, selectors.EVENT_READ)
                while fd in self._selector.get_map() and poll.select(0):
                    action(rank)
        if handle.channel in self._selector.get_map():
            self._on_channel(rank)
        if handle.ended:
            rank.output.finish()

    # What follows from it.

    def _when_ready(self, rank: _Rank) -> None:
        if self._stage is not None:
            self._let_go(rank)
            return
        rank.handle.channel.send(Call(parcel=self._call.parcel), self._call.fds)
        if all(rank.ready for rank in self._ranks):
            self._start_ends = float("inf")
            if self._timeout is not None:
                self._overdue_at = time.monotonic() + self._timeout

    def _when_answered(self, rank: _Rank, message: Result | Failure, fds: tuple[int, ...]) -> None:
        if isinstance(message, Failure) and not self._signals_were_sent():
            self._stop(failed(rank.handle, message, fds, rank.output.tail))
        if self._stage is not None:
            if self._signals_were_sent():
                self._let_go(rank)
        elif all(isinstance(rank.answer and rank.answer[0], Result) for rank in self._ranks):
            self._quit_ends = time.monotonic() + self._patience.quit
            for one in self._ranks:
                self._let_go(one)

    def _let_go(self, rank: _Rank) -> None:
        if not rank.told_to_quit:
            rank.told_to_quit = True
            with contextlib.suppress(OSError):  # it has ended by itself
                rank.handle.channel.send(Quit())

    def _stop(self, incident: Incident) -> None:
        self._incidents.append(incident)
        if self._stage is None:
            self._enter(Stage.ASK)

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
        self._stage_ends = time.monotonic() + grace
        for rank in self._ranks:
            if rank.handle.ended:
                continue
            if stage is Stage.ASK:
                if rank.ready and rank.answer is None:
                    rank.handle.signal(DUMP_SIGNAL)
            elif stage is Stage.INTERRUPT and (rank.answer is not None or not rank.ready):
                self._let_go(rank)
            elif stage is Stage.INTERRUPT:
                rank.handle.announce_interrupt()
                rank.handle.signal(signal.SIGINT)
            else:
                rank.handle.signal(signal.SIGTERM if stage is Stage.TERMINATE else signal.SIGKILL)

    def _act_on_deadlines(self) -> None:
        now = time.monotonic()
        if now >= min(self._start_ends, self._overdue_at):
            late = [
                rank.handle.rank
                for rank in self._ranks
                if not (rank.ready if self._start_ends <= now else rank.answer)
            ]
            seconds = self._patience.start if self._start_ends <= now else self._timeout or 0.0
            self._start_ends = self._overdue_at = float("inf")
            self._stop(Incident(error=Overdue(seconds=seconds, ranks=tuple(late)), when=now))
        if now >= self._quit_ends:
            # They have answered; what they do on leaving is not worth an error, only an end.
            self._quit_ends = float("inf")
            self._enter(Stage.TERMINATE)
        if now >= self._stage_ends and self._stage is not None:
            self._enter(Stage(self._stage + 1))

    def _next_deadline(self) -> float:
        return min(self._start_ends, self._overdue_at, self._quit_ends, self._stage_ends)

    def _whereabouts(self) -> dict[int, str]:
        return {
            rank.handle.rank: bytes(rank.stacks).decode(errors="replace") for rank in self._ranks if rank.stacks
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
