"""A rank as the loop sees it: its handle, what it says, and what is known of it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from nb_accelerate.diagnostics.stacks import is_whole
from nb_accelerate.protocol.messages import Quit
from nb_accelerate.ranks.output import RankOutput

if TYPE_CHECKING:
    from nb_accelerate.protocol.messages import Display
    from nb_accelerate.ranks.handle import RankHandle
    from nb_accelerate.ranks.loop import RankLoop


class RankProxy:
    """Owns a rank's handle.

    Args:
        handle: the rank's connections.
        loop: takes its output; `RankLoop.add` it there.

    Attributes:
        rank: its number.
        handle: its connections.
        output: takes what it prints.
        displays: messages whose place in the output has not come yet.
        inbox: other messages that have come, each with its descriptors.
        stacks: what it answered when it was asked where it is.
        has_answered: set when all of that has come, or the rank has ended.
        is_ready: it has been set up.
        is_stopped: it was suspended when it was looked at last.
        is_leaving: it was told to end on purpose.
        why_lost: why it is of no use any more, although its process may live; "" for one that is.
        lost_by: the exception that told so, if there was one: it becomes the cause of the error about this rank.
    """

    def __init__(self, handle: RankHandle, loop: RankLoop) -> None:
        self.rank = handle.rank
        self.handle = handle
        self.output = RankOutput(
            handle.mark,
            lambda stream, text: loop.show_text(self, stream, text),
            alone=False,
            on_display=lambda: loop.show_display(self),
        )
        self.displays: deque[Display] = deque()
        self.inbox: deque[tuple[Any, tuple[int, ...]]] = deque()
        self.stacks = bytearray()
        self.has_answered = threading.Event()
        self.is_ready = False
        self.is_stopped = False
        self.is_leaving = False
        self.why_lost = ""
        self.lost_by: Exception | None = None

    @property
    def is_gone(self) -> bool:
        """It has ended, or is of no use any more."""
        return self.handle.ended or bool(self.why_lost)

    def ask_for_stacks(self) -> None:
        """Have it write where it is; what it wrote before is forgotten."""
        self.stacks.clear()
        self.has_answered.clear()
        self.handle.dump_stacks()

    def take_stacks(self, data: bytes) -> None:
        """Take a piece of what it writes about where it is."""
        self.stacks += data
        if is_whole(self.stacks):
            self.has_answered.set()

    def quit(self) -> None:
        """Tell it to end by itself, once."""
        if not self.is_leaving:
            self.is_leaving = True
            with contextlib.suppress(OSError):  # it has just ended, which its status tells
                self.handle.channel.send(Quit())

    def close(self) -> None:
        """Let go of it."""
        for _, fds in self.inbox:
            for fd in fds:
                os.close(fd)
        self.inbox.clear()
        self.handle.close()
