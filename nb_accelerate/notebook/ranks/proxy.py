"""A rank as the loop sees it: its connections, its output, and what is known about it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.diagnostics.stacks import is_whole
from nb_accelerate.notebook.protocol.messages import Quit
from nb_accelerate.notebook.ranks.output.rank_output import RankOutput
from nb_accelerate.notebook.ranks.timeouts import NEVER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.notebook.protocol.messages import Display
    from nb_accelerate.notebook.ranks.handle import RankHandle

# Seconds in which a thread of a rank answers if it gets the interpreter's lock. A busy machine needs most of them.
_ANSWER_TIMEOUT = 0.15


class RankProxy:
    """Owns a rank's handle, and keeps what came from the rank until it is wanted. `RankLoop.add` has it read.

    Attributes:
        inbox: other messages that have come, each with its descriptors.
        lost_by: the exception behind `why_lost`, if there is one; the cause of the error about this rank.
        steps: number of collectives that each of its process groups had seen at the end of its last cell, by group.
    """

    def __init__(self, handle: RankHandle) -> None:
        self.rank = handle.rank
        self.handle = handle
        self.output = RankOutput(handle.mark)
        self.displays: deque[Display] = deque()  # displays that have come and whose places in the output have not
        self.inbox: deque[tuple[Any, tuple[int, ...]]] = deque()
        self.stacks = bytearray()  # what it has written since `ask_for_stacks`
        self.has_stacks = threading.Event()  # set when all of that has come, or the rank has ended
        self.stacks_due = NEVER  # `time.monotonic` of `ask_by_signal`
        self.is_ready = False
        self.is_leaving = False
        self.why_lost = ""  # why it is of no use any more although its process may live; "" for one that is of use
        self.lost_by: Exception | None = None
        self.has_joined = False  # it has been in the process group of a pool, so that it may have variables
        self.device = ""
        self.steps: Mapping[str, int] = {}

    @property
    def label(self) -> str:
        """Its number, with the name of its machine if that is another one than this: ``2 on b``."""
        machine = self.handle.machine
        is_said = not machine or f"machine {machine} " in self.handle.lost
        return f"{self.rank}" if is_said else f"{self.rank} on {machine}"

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, or is of no use any more."""
        return self.handle.ended or bool(self.why_lost)

    @property
    def dump(self) -> str:
        """What it has written of its stacks, as text."""
        return bytes(self.stacks).decode(errors="replace")

    def ask_for_stacks(self) -> None:
        """Have it write where its main thread is, and forget what it wrote before. For the loop's thread.

        A rank that has not answered the last time is asked by a signal.
        """
        self.stacks.clear()
        self.has_stacks.clear()
        if self.stacks_due < NEVER:
            self.ask_by_signal()
        else:
            self.stacks_due = time.monotonic() + _ANSWER_TIMEOUT
            self.handle.dump_stacks()

    def ask_by_signal(self) -> None:
        """Have C code of it write where its main thread is: Python code of it does not answer."""
        self.stacks_due = NEVER
        self.handle.dump_stacks(by_signal=True)

    def take_stacks(self, data: bytes) -> None:
        self.stacks_due = NEVER
        self.stacks += data
        if is_whole(self.stacks):
            self.has_stacks.set()

    def quit(self) -> None:
        """Tell it once to end by itself."""
        if not self.is_leaving:
            self.is_leaving = True
            with contextlib.suppress(OSError):  # it has just ended, which its status tells
                self.handle.send(Quit())

    def close(self) -> None:
        """Close its connections, and descriptors of messages that nobody took."""
        for _, fds in self.inbox:
            for fd in fds:
                os.close(fd)
        self.inbox.clear()
        self.handle.close()
