"""A rank as its host sees it: a process of this machine, whose bytes go to the kernel in frames."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.notebook.launch.local import LocalRank
from nb_accelerate.notebook.ranks.handle import RankEvents
from nb_accelerate.notebook.remote.frames import NUMBER, Kind, as_json, pack_message
from nb_accelerate.notebook.remote.mirror import PageWatch, pack_pieces, unpack_pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nb_accelerate.notebook.protocol.channel import Received
    from nb_accelerate.notebook.ranks.end_reports import EndReports
    from nb_accelerate.notebook.remote.frames import Frame
    from nb_accelerate.notebook.remote.segments import SentSegments
    from nb_accelerate.notebook.remote.sender import FrameSender


class HostedRank(RankEvents):
    """Passes on what a rank of this machine sends, and what the kernel sends to it.

    Args:
        key: the number of its handle there.
        on_end: called at its end, with its key.
    """

    def __init__(
        self,
        key: int,
        sender: FrameSender,
        sent: SentSegments,
        on_end: Callable[[int], object],
        *,
        rank: int,
        local_rank: int,
        mark: str,
        store_fd: int,
        ends: EndReports,
    ) -> None:
        self.handle = LocalRank(rank, local_rank=local_rank, ends=ends, store_fd=store_fd)
        self.handle.mark = bytes.fromhex(mark)
        self.handle.channel.loads = bytes
        self.page = PageWatch(self.handle.page)
        self.key, self._sender, self._sent, self._on_end = key, sender, sent, on_end
        self._has_messages = False

    @override
    def messages(self, received: Iterable[Received]) -> None:
        for body, fds in received:
            self._has_messages = True
            numbers = [self._sent.number_of(fd) for fd in fds]
            for fd in fds:
                os.close(fd)
            self.send(Kind.MESSAGE, pack_message(numbers), body)

    @override
    def hand_on(self) -> None:
        if self._has_messages:
            self._has_messages = False
            self.handle.catch_up()
            self.send_page()
            self.send(Kind.HAND_ON)

    @override
    def stdout(self, data: bytes) -> None:
        self.handle.receive()  # a display comes before the place where it stands
        self.send(Kind.STDOUT, data)

    @override
    def stderr(self, data: bytes) -> None:
        self.send(Kind.STDERR, data)

    @override
    def stacks(self, data: bytes) -> None:
        self.send(Kind.STACKS, data)

    @override
    def cannot_read(self, error: Exception) -> None:
        raise error  # a channel whose messages stay pickled has only its own errors

    @override
    def ended(self) -> None:
        self.send_page()
        names = ("exitcode", "lost", "is_lost_with_others")
        self.send(Kind.END, as_json({name: getattr(self.handle, name) for name in names}))
        self._on_end(self.key)

    def send(self, kind: Kind, *parts: bytes) -> None:
        """Send a frame about it."""
        self._sender.send(kind, self.key, *parts)

    def send_page(self) -> None:
        """Send what has changed on its page."""
        if pieces := self.page.changed():
            self.send(Kind.PAGE, pack_pieces(pieces))

    def look(self) -> None:
        """Look whether nobody will report its end."""
        if self.handle.is_lost():
            self.handle.give_up()
            self.ended()

    def take(self, frame: Frame) -> None:
        """Do what the kernel says; messages are passed on by the host, which has what comes with them."""
        handle, body = self.handle, frame.body
        if frame.kind == Kind.PID:
            handle.note_pid(*NUMBER.unpack(body))
        elif frame.kind == Kind.SIGNAL:
            (signum,) = NUMBER.unpack(body)
            if signum == signal.SIGKILL:
                handle.kill()
            else:
                handle.signal(signum)
        elif frame.kind == Kind.POKE:
            handle.request(body)
        elif frame.kind == Kind.PAGE:
            self.page.write(unpack_pieces(body))
        elif frame.kind == Kind.FACTS:
            facts = {"processor_time": handle.processor_time(), "starting": handle.starting()}
            self.send(Kind.FACTS, as_json(facts))
