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
    from nb_accelerate.notebook.ranks.end_reports import EndReports
    from nb_accelerate.notebook.ranks.handle import RankEvents
    from nb_accelerate.notebook.ranks.sources import Sources

logger = logging.getLogger(__name__)


class PipedRank(RankHandle):
    """Reads a rank's four descriptors, and how it has ended.

    It sends a message after what it has printed before, but over another descriptor.
    """

    channel: Channel
    stdout: int  # descriptor with what Python prints and C code writes to descriptor 1
    stderr: int  # descriptor with what C code writes to descriptor 2
    stacks: int  # descriptor with the stack of its main thread, after `dump_stacks`
    ends: EndReports  # says when it has ended; see `read_end`
    key: int = 0  # its number there
    _sources: Sources
    _events: RankEvents

    @abstractmethod
    def read_end(self) -> None:
        """Note that it has ended, and its exit code if `ends` has that."""

    @override
    def connect(self, sources: Sources, events: RankEvents) -> None:
        self._sources, self._events = sources, events
        self._output = select.poll()
        for fd in (self.stdout, self.stderr, self.stacks):
            self._output.register(fd, select.POLLIN)
        actions = (
            self._on_channel,
            self._on_stdout,
            lambda: events.stderr(self._read(self.stderr)),
            lambda: events.stacks(self._read(self.stacks)),
        )
        try:
            for source, action in zip(self._all, actions, strict=True):
                sources.add(source, action)
            self.ends.wait_for(self.key, sources, self._on_end)
        except BaseException:
            self.disconnect()
            raise

    @override
    def disconnect(self) -> None:
        if hasattr(self, "_sources"):  # else an interrupt came before `connect`
            for source in self._all:
                self._sources.drop(source)
            self.ends.forget(self.key, self._sources)

    @override
    def close(self) -> None:
        # Its owner may keep it for long, and the receiver of its events has what ranks returned.
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
        return self.channel, self.stdout, self.stderr, self.stacks

    def _on_channel(self) -> None:
        self.receive()
        self._events.hand_on()

    def _on_stdout(self) -> None:
        data = self._read(self.stdout)
        self._events.stdout(data)
        self._sources.has_read(len(data))
        self._events.hand_on()  # the place of a display may have been read, and with it messages

    def _on_end(self) -> None:
        self._on_channel()
        self.catch_up()
        self.read_end()
        self._events.ended()

    def _read(self, fd: int) -> bytes:
        try:
            return self._sources.read(fd)
        except OSError as error:
            logger.warning("What a rank prints cannot be read any more: %s", error)
            self._sources.drop(fd)
            return b""
