"""Read what ranks send, in the thread of the loop: messages, output, stacks, and their end.

::

    channel --------> messages other than displays --> inbox --> RankReader.on_message, after the output before it
    stdout, stderr --> RankOutput --> whole lines --> RequestOutput.text
                          |
                          +--> place of a display --> the next display of the channel --> RequestOutput.display
    stacks ---------> RankProxy.take_stacks
    status ---------> RankReader.on_end

A rank sends a message after what it has printed before, but over another descriptor. So before a message is handed on,
the rank's output is read as far as it has come.
"""

from __future__ import annotations

import functools
import logging
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import RemoteError
from nb_accelerate.notebook.protocol.messages import Display, ThreadFailed
from nb_accelerate.notebook.ranks.output.guard import OutputGuard
from nb_accelerate.notebook.ranks.sources import Sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.protocol.output import StreamName
    from nb_accelerate.notebook.ranks.output.request_output import RequestOutput
    from nb_accelerate.notebook.ranks.proxy import RankProxy

logger = logging.getLogger(__name__)

_LARGE_READ = 1 << 13
"""Bytes. After a read of stdout that returns fewer, `RankLoop` may pause, so that the next read returns more."""


class RankReader(ABC):
    """Reads the descriptors of ranks, and shows what they print. `RankLoop` handles the rest, in the same thread.

    Attributes:
        output: shows what the ranks print.
        has_read_little: stdout of a rank was read, and only a few bytes were there. Whoever waits resets it.
    """

    def __init__(self, on_ring: Callable[[], object]) -> None:
        self.output: RequestOutput | None = None
        self.has_read_little = False
        self._guard_without_output = OutputGuard()
        self._sources = Sources(on_ring)

    @abstractmethod
    def on_message(self, rank: RankProxy, message: Any, fds: tuple[int, ...]) -> None:
        """Handle a message that is no `Display`; its descriptors are taken over."""

    @abstractmethod
    def on_output(self, rank: RankProxy) -> None:
        """Note that a rank has printed something, perhaps part of a line."""

    @abstractmethod
    def drops_stderr(self) -> bool:
        """Return whether connections were broken on purpose: C++ code complains about that at length."""

    @abstractmethod
    def on_end(self, rank: RankProxy) -> None:
        """Note that a rank has ended, or that it is of no use any more. Called once."""

    def show(self, action: Callable[..., object], *arguments: Any) -> None:
        """Call what shows output of ranks; an error in it is told and logged, and ends nothing else."""
        with self._guard_without_output if self.output is None else self.output.guard:
            action(*arguments)

    def _read_from(self, rank: RankProxy) -> None:
        """Read from a rank from now on."""
        handle = rank.handle
        rank.output.emit = functools.partial(self._show_text, rank)
        rank.output.on_display = functools.partial(self._show_next_display, rank)
        try:
            for source, action in (
                (handle.channel, self._on_channel),
                (handle.stdout, self._on_stdout),
                (handle.stderr, self._on_stderr),
                (handle.stacks, self._on_stacks),
                (handle.status, self._on_status),
            ):
                self._sources.add(source, functools.partial(action, rank))
        except BaseException:
            self._read_no_more(rank)
            raise

    def _read_no_more(self, rank: RankProxy) -> None:
        """Read nothing more from a rank, whose descriptors are still open."""
        handle = rank.handle
        for source in (handle.channel, handle.stdout, handle.stderr, handle.stacks, handle.status):
            self._sources.drop(source)

    def _show_text(self, rank: RankProxy, stream: StreamName, text: str) -> None:
        if self.output is not None:
            self.output.text(rank.rank, stream, text)

    def _show_next_display(self, rank: RankProxy) -> None:
        """Show the next display of a rank, whose place in its output has come."""
        if not rank.displays:
            self._receive(rank)  # a rank sends a display before it marks the place, so it has arrived
        display = rank.displays.popleft() if rank.displays else None
        if display is not None and self.output is not None:
            self.output.display(rank.rank, display)

    def _on_channel(self, rank: RankProxy) -> None:
        self._receive(rank)
        self._hand_on_messages(rank)

    def _receive(self, rank: RankProxy) -> None:
        """Sort what has come over the channel into displays, which wait for their places, and other messages."""
        if rank.handle.channel not in self._sources:
            return
        try:
            messages, is_open = rank.handle.channel.drain()
        except Exception as error:  # the message may be the answer to a request, which would wait for ever
            self._cannot_read(rank, error)
            return
        if not is_open:
            self._sources.drop(rank.handle.channel)
        for message, fds in messages:
            if isinstance(message, Display):
                rank.displays.append(message)
            else:
                rank.inbox.append((message, fds))

    def _hand_on_messages(self, rank: RankProxy) -> None:
        while rank.inbox:
            message, fds = rank.inbox.popleft()
            self._read_output(rank)
            if isinstance(message, ThreadFailed):
                self._thread_failed(rank, message)
            else:
                self.on_message(rank, message, fds)

    def _on_stdout(self, rank: RankProxy) -> None:
        data = self._read(rank.handle.stdout)
        self.show(rank.output.feed, data)
        self.has_read_little = self.has_read_little or len(data) < _LARGE_READ
        self.on_output(rank)
        self._hand_on_messages(rank)  # `_show_next_display` may have received some

    def _on_stderr(self, rank: RankProxy) -> None:
        self._take_stderr(rank, self._read(rank.handle.stderr))
        self.on_output(rank)

    def _take_stderr(self, rank: RankProxy, data: bytes) -> None:
        if not self.drops_stderr():
            self.show(rank.output.feed_stderr, data)

    def _on_stacks(self, rank: RankProxy) -> None:
        rank.take_stacks(self._read(rank.handle.stacks))

    def _on_status(self, rank: RankProxy) -> None:
        self._on_channel(rank)
        self._read_output(rank)
        self._sources.drop(rank.handle.status)
        try:
            rank.handle.read_end()
        except OSError:  # it has ended all the same, and its exit code is not known
            rank.handle.ended = True
        self.show(rank.output.finish)
        if not rank.why_lost:  # else `_cannot_read` has called `on_end`
            self.on_end(rank)

    def _read_output(self, rank: RankProxy) -> None:
        """Read what a rank has written until now, and no more: a rank may print faster than it is read here."""
        handle = rank.handle
        for fd, take in (
            (handle.stdout, functools.partial(self.show, rank.output.feed)),
            (handle.stderr, functools.partial(self._take_stderr, rank)),
            (handle.stacks, rank.take_stacks),
        ):
            left = self._sources.num_waiting(fd)
            while left > 0 and (data := self._read(fd)):
                take(data)
                left -= len(data)

    def _read(self, fd: int) -> bytes:
        try:
            return self._sources.read(fd)
        except OSError as error:
            logger.warning("What a rank prints cannot be read any more: %s", error)
            self._sources.drop(fd)
            return b""

    def _cannot_read(self, rank: RankProxy, error: Exception) -> None:
        """Kill a rank whose messages cannot be read."""
        logger.warning("A message of rank %s cannot be read; it is killed.", rank.rank, exc_info=error)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self._lose(rank, f"what it sent to the notebook cannot be read ({text}), so it was killed", error)

    def _thread_failed(self, rank: RankProxy, message: ThreadFailed) -> None:
        """Kill a rank of which a thread has failed: what that thread was for would be waited for in vain."""
        logger.warning("Rank %s is killed: its thread %s has failed.\n%s", rank.rank, message.name, message.traceback)
        error = RemoteError(message.traceback, rank=rank.rank, type_name=message.error.partition(":")[0])
        self._lose(rank, f"its thread {message.name} has failed ({message.error}), so it was killed", error)

    def _lose(self, rank: RankProxy, why: str, error: Exception) -> None:
        """Kill a rank that is of no use any more."""
        if rank.why_lost:  # and told
            return
        rank.why_lost, rank.lost_by = why, error
        self._sources.drop(rank.handle.channel)
        kill(rank)
        self.on_end(rank)


def kill(rank: RankProxy) -> None:
    """Kill a rank. Never raises: one that cannot be killed keeps nothing from the others."""
    try:
        rank.handle.kill()
    except Exception:
        logger.warning("Rank %s could not be killed.", rank.rank, exc_info=True)


def close_fds(fds: tuple[int, ...]) -> None:
    """Close descriptors of a message that nobody wants."""
    for fd in fds:
        os.close(fd)
