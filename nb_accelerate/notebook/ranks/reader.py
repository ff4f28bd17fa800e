"""Take what ranks send, in the thread of the loop, in the order in which they have sent it.

::

    RankHandle --> messages other than displays --> inbox --> RankReader.on_message, after the output before it
               --> stdout, stderr --> RankOutput --> whole lines --> RequestOutput.text
               |                          |
               |                          +--> place of a display --> the next display --> RequestOutput.display
               --> stacks --> RankProxy.take_stacks
               --> end --> RankReader.on_end
"""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.errors import RemoteError
from nb_accelerate.notebook.protocol.messages import Display, ThreadFailed
from nb_accelerate.notebook.ranks.handle import RankEvents
from nb_accelerate.notebook.ranks.output.guard import OutputGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nb_accelerate.notebook.protocol.channel import Received
    from nb_accelerate.notebook.protocol.output import StreamName
    from nb_accelerate.notebook.ranks.output.request_output import RequestOutput
    from nb_accelerate.notebook.ranks.proxy import RankProxy

logger = logging.getLogger(__name__)

# What torch says of each connection in a network in which addresses have no names. It needs none.
_NO_NAME = re.compile(rb"\[W[^\n]*The hostname of the client socket cannot be retrieved[^\n]*\n")


class RankReader(ABC):
    """Shows what ranks print. `RankLoop` handles the rest, in the same thread."""

    def __init__(self) -> None:
        self.output: RequestOutput | None = None  # shows what the ranks print
        self._guard_without_output = OutputGuard()

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


class Incoming(RankEvents):
    """Takes what one rank sends.

    Args:
        reader: is called with it.
    """

    def __init__(self, rank: RankProxy, reader: RankReader) -> None:
        self._rank = rank
        self._reader = reader
        rank.output.emit = self._show_text
        rank.output.on_display = self._show_next_display

    @override
    def messages(self, received: Iterable[Received]) -> None:
        """Sort messages into displays, which wait for their places in the output, and others."""
        for message, fds in received:
            if self._rank.why_lost:
                close_fds(fds)
            elif isinstance(message, Display):
                self._rank.displays.append(message)
            else:
                self._rank.inbox.append((message, fds))

    @override
    def hand_on(self) -> None:
        while self._rank.inbox:
            message, fds = self._rank.inbox.popleft()
            self._rank.handle.catch_up()
            if isinstance(message, ThreadFailed):  # a wait for the work of that thread would never end
                rank = self._rank.rank
                logger.warning(
                    "Rank %s is killed: its thread %s has failed.\n%s", rank, message.name, message.traceback
                )
                error = RemoteError(message.traceback, rank=rank, type_name=message.error.partition(":")[0])
                self._lose(f"its thread {message.name} has failed ({message.error}), so it was killed", error)
            else:
                self._reader.on_message(self._rank, message, fds)

    @override
    def stdout(self, data: bytes) -> None:
        self._reader.show(self._rank.output.feed, data)
        self._reader.on_output(self._rank)

    @override
    def stderr(self, data: bytes) -> None:
        if not self._reader.drops_stderr() and (data := _NO_NAME.sub(b"", data)):
            self._reader.show(self._rank.output.feed_stderr, data)
        self._reader.on_output(self._rank)

    @override
    def stacks(self, data: bytes) -> None:
        self._rank.take_stacks(data)

    @override
    def cannot_read(self, error: Exception) -> None:
        """Kill the rank: the message may be the answer to a request, which would wait for ever."""
        logger.warning("A message of rank %s cannot be read; it is killed.", self._rank.rank, exc_info=error)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self._lose(f"what it sent to the notebook cannot be read ({text}), so it was killed", error)

    @override
    def ended(self) -> None:
        self._reader.show(self._rank.output.finish)
        if not self._rank.why_lost:  # else `_lose` has called `on_end`
            self._reader.on_end(self._rank)

    def _show_text(self, stream: StreamName, text: str) -> None:
        if self._reader.output is not None:
            self._reader.output.text(self._rank.rank, stream, text)

    def _show_next_display(self) -> None:
        """Show the next display, whose place in the output has come."""
        if not self._rank.displays:
            self._rank.handle.receive()  # a rank sends a display before it marks the place, so it has arrived
        display = self._rank.displays.popleft() if self._rank.displays else None
        if display is not None and self._reader.output is not None:
            self._reader.output.display(self._rank.rank, display)

    def _lose(self, why: str, error: Exception) -> None:
        if self._rank.why_lost:  # it was told already
            return
        # Told at once, and not when the process has gone: what waits for its answer fails now, with the cause.
        self._rank.why_lost, self._rank.lost_by = why, error
        kill(self._rank)
        self._reader.on_end(self._rank)


def kill(rank: RankProxy) -> None:
    """Kill a rank. Never raises: one that cannot be killed keeps nothing from the others."""
    try:
        rank.handle.kill()
    except Exception:
        logger.warning("Rank %s could not be killed.", rank.rank, exc_info=True)


def close_fds(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
