"""Read what ranks send, in the thread of the loop: messages, output, stacks, and their end.

::

    channel --------> messages other than displays --> inbox --> RankEvents.on_message, after the output before it
    stdout, stderr --> RankOutput --> whole lines --> RankEvents.on_text
                          |
                          +--> place of a display --> the next display of the channel --> RankEvents.on_display
    stacks ---------> RankProxy.take_stacks
    status ---------> RankEvents.on_end

A rank sends a message after what it has printed before, but over another descriptor. So before a message is handed on,
the rank's output is read as far as it has come.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any, Protocol

from nb_accelerate.errors import RemoteError
from nb_accelerate.notebook.protocol.messages import Display, ThreadFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.protocol.output import StreamName
    from nb_accelerate.notebook.ranks.proxy import RankProxy
    from nb_accelerate.notebook.ranks.sources import Sources

logger = logging.getLogger(__name__)

_LARGE_READ = 1 << 13
"""Bytes. After a read of stdout that returns fewer, `RankLoop` may pause, so that the next read returns more."""


class RankEvents(Protocol):
    """What the reader calls. All of it runs in the thread of the loop."""

    def show(self, action: Callable[..., object], *arguments: Any) -> None:
        """Call what shows output of ranks; an error in it is told and logged, and ends nothing else."""

    def on_message(self, rank: RankProxy, message: Any, fds: tuple[int, ...]) -> None:
        """Handle a message that is no `Display`; its descriptors are taken over."""

    def on_text(self, rank: RankProxy, stream: StreamName, text: str) -> None:
        """Show whole lines."""

    def on_display(self, rank: RankProxy, display: Display) -> None:
        """Show a display."""

    def on_output(self, rank: RankProxy) -> None:
        """Note that a rank has printed something, perhaps part of a line."""

    def drops_stderr(self) -> bool:
        """Return whether connections were broken on purpose: C++ code complains about that at length."""
        raise NotImplementedError

    def on_end(self, rank: RankProxy) -> None:
        """Note that a rank has ended, or that it is of no use any more. Called once."""


class RankReader:
    """Reads the descriptors of ranks that were added.

    Attributes:
        has_read_little: stdout of a rank was read, and only a few bytes were there. Whoever waits resets it.
    """

    def __init__(self, sources: Sources, events: RankEvents) -> None:
        self._sources = sources
        self._events = events
        self.has_read_little = False

    def add(self, rank: RankProxy) -> None:
        """Read from a rank from now on."""
        handle = rank.handle
        rank.output.emit = functools.partial(self._events.on_text, rank)
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
            self.drop(rank)
            raise

    def drop(self, rank: RankProxy) -> None:
        """Read nothing more from a rank, whose descriptors are still open."""
        handle = rank.handle
        for source in (handle.channel, handle.stdout, handle.stderr, handle.stacks, handle.status):
            self._sources.drop(source)

    def _show_next_display(self, rank: RankProxy) -> None:
        """Show the next display of a rank, whose place in its output has come."""
        if not rank.displays:
            self._receive(rank)  # a rank sends a display before it marks the place, so it has arrived
        if rank.displays:
            self._events.on_display(rank, rank.displays.popleft())

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
                self._events.on_message(rank, message, fds)

    def _on_stdout(self, rank: RankProxy) -> None:
        data = self._read(rank.handle.stdout)
        self._events.show(rank.output.feed, data)
        self.has_read_little = self.has_read_little or len(data) < _LARGE_READ
        self._events.on_output(rank)
        self._hand_on_messages(rank)  # `_show_next_display` may have received some

    def _on_stderr(self, rank: RankProxy) -> None:
        self._take_stderr(rank, self._read(rank.handle.stderr))
        self._events.on_output(rank)

    def _take_stderr(self, rank: RankProxy, data: bytes) -> None:
        if not self._events.drops_stderr():
            self._events.show(rank.output.feed_stderr, data)

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
        self._events.show(rank.output.finish)
        if not rank.why_lost:  # else `_cannot_read` has called `on_end`
            self._events.on_end(rank)

    def _read_output(self, rank: RankProxy) -> None:
        """Read what a rank has written until now, and no more: a rank may print faster than it is read here."""
        handle = rank.handle
        for fd, take in (
            (handle.stdout, functools.partial(self._events.show, rank.output.feed)),
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
        self._events.on_end(rank)


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
