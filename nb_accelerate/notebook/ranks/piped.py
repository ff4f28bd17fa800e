"""A rank that is read over descriptors of its own: messages, output, stacks, and its end."""

from __future__ import annotations

import logging
import select
from abc import abstractmethod
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.notebook.ranks.handle import RankHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.protocol.channel import Channel
    from nb_accelerate.notebook.ranks.handle import RankEvents
    from nb_accelerate.notebook.ranks.sources import Sources

logger = logging.getLogger(__name__)

_LARGE_READ = 1 << 13
"""Bytes. After a read of stdout that returns fewer, `RankLoop` may pause, so that the next read returns more."""


class PipedRank(RankHandle):
    """Reads a rank's five descriptors. It sends a message after what it has printed before, but over another one.

    Attributes:
        stdout: descriptor with what Python prints and C code writes to descriptor 1.
        stderr: descriptor with what C code writes to descriptor 2.
        stacks: descriptor with the stack of its main thread, after `dump_stacks`.
        status: descriptor that becomes readable when the rank has ended; see `read_end`.
    """

    channel: Channel
    stdout: int
    stderr: int
    stacks: int
    status: int
    _sources: Sources
    _events: RankEvents

    @abstractmethod
    def read_end(self) -> None:
        """Read its exit code from `status`, which is readable. Raises OSError."""

    @override
    def connect(self, sources: Sources, events: RankEvents) -> None:
        self._sources, self._events = sources, events
        self._output = select.poll()
        for fd in (self.stdout, self.stderr, self.stacks):
            self._output.register(fd, select.POLLIN)
        actions = self._on_channel, self._on_stdout, self._on_stderr, self._on_stacks, self._on_status
        try:
            for source, action in zip(self._all, actions, strict=True):
                sources.add(source, action)
        except BaseException:
            self.disconnect()
            raise

    @override
    def disconnect(self) -> None:
        for source in self._all if hasattr(self, "_sources") else ():  # else an interrupt came before `connect`
            self._sources.drop(source)

    @override
    def close(self) -> None:
        # Whoever started it may keep it for long, and what it told events to has what ranks returned.
        for name in ("_sources", "_events"):
            vars(self).pop(name, None)

    @override
    def catch_up(self) -> None:
        if not self._output.poll(0):  # as before most messages, which a call for each descriptor would hold up
            return
        for fd, take in (
            (self.stdout, self._events.stdout),
            (self.stderr, self._events.stderr),
            (self.stacks, self._events.stacks),
        ):
            left = self._sources.num_waiting(fd)
            while left > 0 and (data := self._read(fd)):
                take(data)
                left -= len(data)

    @override
    def receive(self) -> None:
        if self.channel not in self._sources:
            return
        try:
            received, is_open = self.channel.drain()
        except Exception as error:
            self._sources.drop(self.channel)
            self._events.cannot_read(error)
            return
        if not is_open:
            self._sources.drop(self.channel)
        self._events.messages(received)

    @override
    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        self.channel.send(message, fds)

    @property
    def _all(self) -> tuple[Channel | int, ...]:
        return self.channel, self.stdout, self.stderr, self.stacks, self.status

    def _on_channel(self) -> None:
        self.receive()
        self._events.hand_on()

    def _on_stdout(self) -> None:
        data = self._read(self.stdout)
        self._events.stdout(data)
        self._sources.has_read_little = self._sources.has_read_little or len(data) < _LARGE_READ
        self._events.hand_on()  # the place of a display may have been read, and with it messages

    def _on_stderr(self) -> None:
        self._events.stderr(self._read(self.stderr))

    def _on_stacks(self) -> None:
        self._events.stacks(self._read(self.stacks))

    def _on_status(self) -> None:
        self._on_channel()
        self.catch_up()
        self._sources.drop(self.status)
        try:
            self.read_end()
        except OSError:  # it has ended all the same, and its exit code is not known
            self.ended = True
        self._events.ended()

    def _read(self, fd: int) -> bytes:
        try:
            return self._sources.read(fd)
        except OSError as error:
            logger.warning("What a rank prints cannot be read any more: %s", error)
            self._sources.drop(fd)
            return b""
