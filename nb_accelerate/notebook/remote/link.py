"""The kernel's side of one machine: it reads what its host sends, for all ranks there, and tells the host what to do.

One descriptor is waited for, for the frames of all ranks. What is sent goes out in a thread of its own, so that a slow
network does not hold up the kernel. That thread also notices if nothing has been heard for long.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from nb_accelerate.errors import StartError
from nb_accelerate.notebook.protocol.interrupts import interrupts_later
from nb_accelerate.notebook.remote import sender
from nb_accelerate.notebook.remote.frames import BEAT, MACHINE, FrameParser, Kind, LinkError, as_json
from nb_accelerate.notebook.remote.sender import FrameSender, ReceivedSegments, SentSegments, Silence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nb_accelerate.notebook.ranks.sources import Sources
    from nb_accelerate.notebook.remote.frames import Frame
    from nb_accelerate.notebook.remote.streams import Stream

logger = logging.getLogger(__name__)

_CHECK_INTERVAL = 0.1  # seconds between two calls of what `Link.ask` is to check meanwhile


class TakesFrames(Protocol):
    """A rank, as its link sees it."""

    def take(self, frame: Frame) -> None:
        """Take a frame that is about it."""

    def lose(self, why: str) -> None:
        """Note that no other frame will come."""


class Link:
    """A connection to the host of one machine. `close` it, and its host ends with all that it has started."""

    def __init__(self, stream: Stream) -> None:
        self.name = stream.name  # of the machine
        self.hello: dict[str, Any] = {}  # what the host says about its machine; empty before `open`
        self.lost = ""  # why nothing comes from it any more; "" if something may
        self.ahead = float("inf")  # seconds by which `time.monotonic` of this machine is ahead of that one's
        self._stream = stream
        self.received = ReceivedSegments()
        self._parser = FrameParser(stream.seal, has_preamble=True)
        self._silence = Silence(self._parser, stream.reads)
        self._heard_at = time.monotonic()
        self._handles: dict[int, TakesFrames] = {}
        self._keys, self._questions = itertools.count(), itertools.count()
        self._answers: dict[int, dict[str, Any]] = {}
        self._callbacks: dict[int, Callable[[dict[str, Any]], object]] = {}
        self._answered = threading.Condition()
        self._sources: Sources | None = None
        self._is_closed = False
        with interrupts_later():
            os.set_blocking(stream.reads, False)
            self._bell_read, self._bell_write = os.pipe()
            self._sender = FrameSender(stream.writes, stream.seal, on_beat=self._beat, on_failure=self._cannot_send)
            self.sent = SentSegments(self._sender)
            self._sender.start()

    # Called before a loop reads the link, or in other threads than the loop's.

    def open(self, seconds: float, check: Callable[[], object] = lambda: None) -> None:
        """Wait until the host has said what its machine is.

        Raises:
            StartError: it does not, or what comes is not from a host.
        """
        self._read_until(lambda: bool(self.hello), seconds, check)

    def ask(
        self, what: str, *, seconds: float = 30.0, check: Callable[[], object] = lambda: None, **arguments: Any
    ) -> dict[str, Any]:
        """Ask the host something, and wait for the answer. Not for the loop's thread, once there is a loop.

        Raises:
            StartError: it cannot do it, or does not answer in time.
        """
        return self.answer_to(self.put(what, **arguments), seconds, check)

    def put(self, what: str, **arguments: Any) -> int:
        """Put a question to the host, and return its number, for `answer_to`."""
        return self.query(what, lambda answer: self._answers.update({answer["number"]: answer}), **arguments)

    def answer_to(self, number: int, seconds: float, check: Callable[[], object]) -> dict[str, Any]:
        """Wait for the answer to a question that was `put`. Raises what `ask` raises."""
        deadline = time.monotonic() + seconds
        while number not in self._answers:
            left = deadline - time.monotonic()
            if self.lost or left <= 0:
                raise StartError(self._failed(self.lost or f"has not answered within {seconds:g} s"))
            # Without a loop the thread that asks reads the link itself. With one only the loop's thread may, and that
            # wakes up this one.
            if self._sources is None:
                self._read_until(lambda: number in self._answers or self._sources is not None, left, check)
            else:
                with self._answered:
                    self._answered.wait_for(lambda: self.lost or number in self._answers or self._sources is None, left)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise StartError(f"machine {self.name}: {answer['error']}")
        return answer

    @staticmethod
    def ask_all(
        questions: Iterable[tuple[Link, str, dict[str, Any]]],
        *,
        seconds: float = 30.0,
        check: Callable[[], object] = lambda: None,
    ) -> list[dict[str, Any]]:
        """Ask several hosts at the same time, as `ask` does, and return their answers in this order."""
        asked = [(link, link.put(what, **arguments)) for link, what, arguments in questions]
        return [link.answer_to(number, seconds, check) for link, number in asked]

    def query(self, what: str, then: Callable[[dict[str, Any]], object], **arguments: Any) -> int:
        """Ask the host something, and have `then` called with the answer, where it is read. Returns a number for it."""
        number = next(self._questions)
        self._callbacks[number] = then
        self.send(Kind.ASK, MACHINE, as_json({"number": number, "what": what, **arguments}), urgent=True)
        return number

    def _read_until(self, is_there: Callable[[], bool], seconds: float, check: Callable[[], object]) -> None:
        poll = select.poll()
        for fd in (self._stream.reads, self._bell_read):
            poll.register(fd, select.POLLIN)
        deadline = time.monotonic() + seconds
        while not is_there():
            if self.lost:
                raise StartError(self._failed(self.lost))
            if time.monotonic() > deadline:
                raise StartError(self._failed(f"has not answered within {seconds:g} s"))
            check()
            for fd, _ in poll.poll(1000 * _CHECK_INTERVAL):
                if fd == self._bell_read:
                    self._answer_bell()
                else:
                    self._read()

    def _failed(self, why: str) -> str:
        printed = "" if self._parser.is_open else self._parser.preamble.decode(errors="replace").strip()
        return f"machine {self.name} {why}" + (f". It printed:\n{printed}" if printed else "")

    # For ranks.

    def start(self, handle: TakesFrames, **how: Any) -> int:
        """Have the host start a rank, and return the number of its handle."""
        key = next(self._keys)
        self._handles[key] = handle
        if not self.lost:
            self.send(Kind.START, key, as_json(how), urgent=True)
        return key

    def forget(self, key: int) -> None:
        """Drop what still comes of a rank. Without ranks it is not read by a loop, which may be closed next."""
        self._handles.pop(key, None)
        if not self._handles:
            self._detach()

    def attach(self, sources: Sources) -> None:
        """Be read whenever `sources` is waited for."""
        if self._sources is not sources:
            self._detach()
            self._sources = sources
            sources.add(self._bell_read, self._answer_bell)
            if not self.lost:
                sources.add(self._stream.reads, self._read)

    def _detach(self) -> None:
        if self._sources is not None:
            for fd in (self._stream.reads, self._bell_read):
                self._sources.drop(fd)
        self._sources = None
        self._notify()

    def _notify(self) -> None:
        """Wake up the threads that wait for an answer, or for the end of the loop that read it."""
        with self._answered:
            self._answered.notify_all()

    def send(self, kind: Kind, rank: int, *parts: bytes, urgent: bool = False) -> None:
        """Send a frame. Raises BrokenPipeError if the machine is lost."""
        if self.lost:
            raise BrokenPipeError(self.lost)
        self._sender.send(kind, rank, *parts, urgent=urgent)

    def unsent(self) -> tuple[int, int]:
        """Return the bytes that wait to be sent, and those of all large values since none of these has waited."""
        return (0, 0) if self.lost else self._sender.unsent()

    def is_slow(self) -> bool:
        """Return whether what was sent may not have come: some of it waits here, or a beat is late."""
        is_late = time.monotonic() > self._heard_at + 1.5 * sender.BEAT_INTERVAL
        return not self.lost and (is_late or self._sender.unsent()[0] > 0)

    def take_back(self, key: int) -> None:
        """Send no more of large values that only messages to one rank need."""
        self.sent.forget(self._sender.take_back(key))

    # What comes.

    def _read(self) -> None:
        try:
            size = self._parser.receive(self._stream.reads)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self._lose(self._stream.why_ended() or "its connection has ended")
            return
        self._heard_at = time.monotonic()
        try:
            for frame in self._parser:
                self._take(frame)
        except LinkError as error:
            self._lose(str(error))

    def _take(self, frame: Frame) -> None:
        if frame.rank != MACHINE:
            if self._sources is not None and frame.kind == Kind.STDOUT:
                self._sources.has_read(len(frame.body))
            if handle := self._handles.get(frame.rank):
                handle.take(frame)
        elif frame.kind == Kind.BEAT:
            self.ahead = min(self.ahead, time.monotonic() - BEAT.unpack(frame.body)[0])
        elif frame.kind == Kind.SEGMENT:
            self.received.take(frame.body)
        elif frame.kind == Kind.DROP:
            self.received.drop(frame.body)
        elif frame.kind == Kind.HELLO:
            self.hello = json.loads(frame.body)
            self.ahead = time.monotonic() - self.hello["monotonic"]
        elif frame.kind == Kind.ANSWER:
            answer = json.loads(frame.body)
            self._callbacks.pop(answer["number"])(answer)
            self._notify()
        else:
            raise LinkError(f"a frame of kind {frame.kind} came, which is none of a host's")

    def _answer_bell(self) -> None:
        why = os.read(self._bell_read, 1 << 12).decode(errors="replace")
        self._lose(why)

    def _lose(self, why: str) -> None:
        if self.lost:
            return
        self.lost = f"{'is lost' if self.hello else 'cannot be reached'}: {why}"
        if self._sources is not None:
            self._sources.drop(self._stream.reads)
        self._sender.close(drop=True)
        self._stream.close(at_once=True)
        self._notify()
        for handle in list(self._handles.values()):
            handle.lose(f"machine {self.name} {self.lost}")

    # The thread that sends.

    def _beat(self) -> bool:
        """Return whether to send one: none before the host has begun to speak, since a terminal would print it."""
        self.sent.drop_unused()
        if self._silence.count_beat():
            why = "it is down, suspended or without network"
            if not self.hello:  # only the line before its first frame has come
                why = "the command buffers output until a line ends, as srun does without -u"
            self._ring(f"nothing was heard of it for {sender.SILENCE_LIMIT:g} s: {why}")
        return self._parser.is_open

    def _cannot_send(self, _: str, error: BaseException) -> None:
        if not isinstance(error, OSError):
            logger.error("The thread that sends to machine %s has failed.", self.name, exc_info=error)
        # A closed stream is told where it is read, since what the machine has sent before it closed it says more.
        if not isinstance(error, BrokenPipeError):
            self._ring(f"nothing can be sent to it ({type(error).__name__}: {error})")

    def _ring(self, why: str) -> None:
        # Only the thread that reads may end the link: it takes it out of its loop, and tells the ranks.
        if not self._is_closed:
            os.write(self._bell_write, why.encode())

    def give_up(self) -> None:
        """End the link if its host is silent: an interrupt does not wait for it. The host ends by itself."""
        if self.is_slow():
            self._ring("it was silent when the wait for its end was interrupted")

    def quit(self) -> None:
        """Have the host end, without waiting for that: several can end together before they are closed."""
        if not (self.lost or self._is_closed):
            self._sender.send(Kind.QUIT, MACHINE, urgent=True)

    def close(self) -> None:
        """End the host and all that it has started. Can be repeated."""
        if self._is_closed:
            return
        try:
            if not self.lost:
                self.quit()
                # A command that never was a host, and prints for ever say, is not waited for.
                self._sender.close(drop=not self.hello)
                if self.hello:
                    self._await_end()
        finally:  # an interrupt ends the wait, and no more than that
            with interrupts_later():
                self._end()

    def _end(self) -> None:
        if not self._is_closed:
            if not self.lost:
                self.lost = "was closed"
                self._stream.close(at_once=not self.hello)
            self._is_closed = True
            self.sent.close()
            self.received.close()
            os.close(self._bell_read)
            os.close(self._bell_write)

    def _await_end(self) -> None:
        poll = select.poll()
        for fd in (self._stream.reads, self._bell_read):
            poll.register(fd, select.POLLIN)
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        while (ready := poll.poll(1000 * max(0.0, deadline - time.monotonic()))) and time.monotonic() < deadline:
            if any(fd == self._bell_read for fd, _ in ready):
                self._answer_bell()
                return
            try:
                if not os.read(self._stream.reads, 1 << 20):
                    return
            except OSError:
                return


_CLOSE_TIMEOUT = 6.0  # seconds for a host to end, longer than the time it gives its server
