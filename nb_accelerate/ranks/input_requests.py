"""Lines that debuggers on ranks want from the user, on their way to whoever waits for the ranks."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.protocol.messages import InputReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.protocol.messages import InputRequest
    from nb_accelerate.ranks.proxy import RankProxy

_NEXT_LINE = 0.5
"""Seconds in which a rank whose debugger went on may ask at the next line before another rank is given a turn."""

_LONGEST_WAIT = 0.25
"""Seconds. A signal just before one long wait begins would be noticed when it ends."""


@dataclass(frozen=True)
class PendingInput:
    """An `InputRequest` and the rank that sent it."""

    rank: RankProxy
    request: InputRequest

    @property
    def prompt(self) -> str:
        """What to show, with the rank that asks."""
        return f"rank {self.rank.rank} {self.request.prompt}"

    def answer(self, text: str | None) -> None:
        """Send a line; None says that there will be none."""
        with contextlib.suppress(OSError):  # it has just ended
            self.rank.handle.channel.send(InputReply(number=self.request.number, text=text))


class InputRequests:
    """The lines that the ranks of one request want. The loop's thread puts them, the one that waits gets them.

    Once a rank is talked to, others wait until its debugger lets the cell go on.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[PendingInput] = []
        self._rank = -1
        self._talks = False
        self._closed = False

    def put(self, request: PendingInput) -> None:
        """Add one."""
        with self._changed:
            self._waiting.append(request)
            self._changed.notify_all()

    def goes_on(self, rank: int) -> None:
        """Take note that the debugger of a rank has let its cell go on."""
        with self._changed:
            if rank == self._rank:
                self._talks = False
                self._changed.notify_all()

    def gone(self, rank: int) -> None:
        """Take note that a rank will not ask any more."""
        with self._changed:
            if rank == self._rank:
                self._rank, self._talks = -1, False
                self._changed.notify_all()

    def close(self) -> None:
        """Have `get` give None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def get(self) -> PendingInput | None:
        """Wait for the next one; None if there will be none. For one thread, which may be the main one."""
        with self._changed:
            self._wait_for(self._has_news)
            self._wait_for(lambda: not self._talks or self._has_more_of_same_rank())
            self._changed.wait_for(lambda: self._rank < 0 or self._has_more_of_same_rank(), _NEXT_LINE)
            if self._closed:
                return None
            request = min(self._waiting, key=lambda one: (one.rank.rank != self._rank, one.rank.rank))
            self._waiting.remove(request)
            self._rank, self._talks = request.rank.rank, True
            return request

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not self._changed.wait_for(condition, _LONGEST_WAIT):
            pass

    def _has_news(self) -> bool:
        return self._closed or bool(self._waiting)

    def _has_more_of_same_rank(self) -> bool:
        return self._closed or any(one.rank.rank == self._rank for one in self._waiting)
