"""A rank on another machine, as the kernel sees it. It has no descriptor of its own: frames of its machine fill it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import time
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.errors import StartError
from nb_accelerate.notebook.protocol.channel import Received
from nb_accelerate.notebook.protocol.messages import CellEnd, Failure
from nb_accelerate.notebook.protocol.output import new_mark
from nb_accelerate.notebook.ranks.handle import RankHandle
from nb_accelerate.notebook.remote.frames import LISTENER, NUMBER, Kind, pack_message, unpack_message
from nb_accelerate.notebook.remote.mirror import PageMirror, pack_pieces, unpack_pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.protocol.messages import Call, Join, RunCell
    from nb_accelerate.notebook.ranks.handle import RankEvents
    from nb_accelerate.notebook.ranks.sources import Sources
    from nb_accelerate.notebook.remote.frames import Frame
    from nb_accelerate.notebook.remote.link import Link

# Seconds from SIGKILL until the host must have reported the end of a rank. It gives up sooner, and says so.
_KILL_TIMEOUT = 30.0


_MEMORY_TIMEOUT = 2.0  # seconds for its machine to say how much memory it holds


class RemoteRank(RankHandle):
    """A rank of another machine.

    Args:
        how: what its host is to know to start it.
    """

    page: PageMirror

    def __init__(self, link: Link, rank: int, *, local_rank: int, **how: Any) -> None:
        self.link = link
        self.machine = link.name
        self.rank = rank
        self.local_rank = local_rank
        self.mark = new_mark()
        self.page = PageMirror(lambda pieces: self._tell(Kind.PAGE, pack_pieces(pieces)))
        self._events: RankEvents | None = None
        self._early: list[Frame] = []
        self._facts: dict[str, Any] = {}
        self._asked = self._interrupts = 0
        self._killed_at = float("inf")
        self._is_readable = True
        self._is_closed = False
        self._key = link.start(self, rank=rank, local_rank=local_rank, mark=self.mark.hex(), **how)
        if link.lost:
            self.lose(f"machine {link.name} {link.lost}")

    # Frames that come.

    def take(self, frame: Frame) -> None:
        """Take a frame; before `connect` it is kept."""
        if self._events is None:
            self._early.append(frame)
            return
        events, body = self._events, frame.body
        if frame.kind == Kind.MESSAGE:
            self._take_message(events, body)
        elif frame.kind == Kind.HAND_ON:
            events.hand_on()
        elif frame.kind == Kind.STDOUT:
            events.stdout(body)
            events.hand_on()
        elif frame.kind == Kind.STDERR:
            events.stderr(body)
        elif frame.kind == Kind.STACKS:
            events.stacks(body)
        elif frame.kind == Kind.PAGE:
            self.page.take(unpack_pieces(body), ahead=self.link.ahead)
        elif frame.kind == Kind.FACTS:
            self._facts = json.loads(body)
        elif frame.kind == Kind.END:
            self._end(**json.loads(body))

    def lose(self, why: str) -> None:
        """Note that its machine is lost, and with it the rank."""
        if not self.ended:
            self._end(None, why, is_lost_with_others=True)

    def _take_message(self, events: RankEvents, body: bytes) -> None:
        numbers, pickled = unpack_message(body)
        fds = tuple(os.dup(self.link.received.get(number)) for number in numbers)
        if not self._is_readable:
            for fd in fds:
                os.close(fd)
            return
        try:
            message = pickle.loads(pickled)
        except Exception as error:
            self._is_readable = False
            events.cannot_read(error)
            return
        events.messages([Received(self._with_own_time(message), fds)])

    def _with_own_time(self, message: Any) -> Any:
        """Return a message in which the time of a failure is by the clock of this machine."""
        if isinstance(message, Failure):
            return dataclasses.replace(message, when=message.when + self.link.ahead)
        if isinstance(message, CellEnd) and isinstance(message.answer, Failure):
            return dataclasses.replace(message, answer=self._with_own_time(message.answer))
        return message

    def _end(self, exitcode: int | None, lost: str, *, is_lost_with_others: bool = False) -> None:
        self.exitcode, self.lost, self.is_lost_with_others = exitcode, lost, is_lost_with_others
        self.ended = True
        self.link.forget(self._key)
        if self._events is not None:
            self._events.ended()

    # Called by the loop.

    @override
    def note_pid(self, pid: int) -> None:
        super().note_pid(pid)
        self._tell(Kind.PID, NUMBER.pack(pid))

    @override
    def connect(self, sources: Sources, events: RankEvents) -> None:
        self._events = events
        self.link.attach(sources)
        early, self._early = self._early, []
        for frame in early:
            self.take(frame)
        if self.ended:
            events.ended()

    @override
    def disconnect(self) -> None:
        self._events = None
        self.link.forget(self._key)

    @override
    def catch_up(self) -> None:
        return  # what it has printed before a message has come before it

    @override
    def receive(self) -> None:
        return  # a display has come before the place where it stands

    @override
    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        if self.ended:
            raise BrokenPipeError(self.lost)
        numbers = [fd if fd == LISTENER else self.link.sent.number_of(fd) for fd in fds]
        self.link.send(Kind.MESSAGE, self._key, pack_message(numbers), pickle.dumps(message, protocol=5))

    @override
    def ask(self, message: Call | Join | RunCell, fds: Sequence[int] = ()) -> None:
        self.send(message, fds)
        self._asked += 1

    @override
    def interrupt(self) -> None:
        if not self._is_closed:
            self._interrupts += 1
            self.page.interrupt(self._asked, self._interrupts)
            if self.pid is not None:  # else what sets it up may be on its way
                self.link.take_back(self._key)
        self.signal(signal.SIGINT)

    @override
    def processor_time(self) -> float | None:
        if self.exitcode is not None:
            return 0.0
        self._tell(Kind.FACTS)  # for the next time
        seconds: float | None = self._facts.get("processor_time")
        return seconds

    @override
    def starting(self) -> tuple[float, str]:
        self._tell(Kind.FACTS)  # for the next time
        work, where = self._facts.get("starting", (0.0, "not known"))
        return work, where

    @override
    def memory(self) -> int:
        with contextlib.suppress(StartError, BrokenPipeError):  # its machine is lost, or busy
            return int(self.link.ask("memory", seconds=_MEMORY_TIMEOUT, pid=self.pid)["bytes"])
        return 0

    @override
    def unsent(self) -> tuple[int, int]:
        return self.link.unsent()

    @override
    def is_slow(self) -> bool:
        return self.link.is_slow()

    @override
    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    @override
    def kill(self) -> None:
        self._killed_at = min(self._killed_at, time.monotonic())
        self.signal(signal.SIGKILL)

    @override
    def signal(self, signum: int) -> None:
        self._tell(Kind.SIGNAL, NUMBER.pack(signum))

    @override
    def request(self, what: bytes) -> None:
        self._tell(Kind.POKE, what)

    @override
    def is_lost(self) -> bool:
        if self.ended or time.monotonic() < self._killed_at + _KILL_TIMEOUT:
            return False
        self.lost = f"its machine {self.link.name} has not reported its end, {_KILL_TIMEOUT:g} s after it was killed"
        return True

    @override
    def give_up(self) -> None:
        self.kill()
        self.ended = True

    @override
    def close(self) -> None:
        self.disconnect()
        if not self._is_closed:
            self._is_closed = True
            self.page.close()

    def _tell(self, kind: Kind, body: bytes = b"") -> None:
        if not (self.ended or self.link.lost):
            self.link.send(kind, self._key, body, urgent=True)
