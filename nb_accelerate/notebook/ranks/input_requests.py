"""Queue the requests for input of debuggers on ranks, until the thread that waits for the ranks asks the user."""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.notebook.protocol.messages import InputReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.protocol.messages import InputRequest
    from nb_accelerate.notebook.ranks.proxy import RankProxy

# Seconds in which a debugger that let the code go on may ask again, as it does at the next line while the user steps.
# Then another rank may ask.
_NEXT_LINE_TIMEOUT = 0.5

_MAX_WAIT = 0.25  # Seconds of a single wait, at most: Python runs handlers of signals only between waits.


@dataclass(frozen=True)
class PendingInput:
    """An `InputRequest` and the rank that sent it."""

    rank: RankProxy
    request: InputRequest

    @property
    def prompt(self) -> str:
        """The prompt to show, with the rank in front of it."""
        return f"rank {self.rank.rank} {self.request.prompt}"

    def answer(self, text: str | None) -> None:
        """Send the line to the rank; None for the end of input."""
        with contextlib.suppress(OSError):  # it has just ended
            self.rank.handle.send(InputReply(number=self.request.number, text=text))


class InputRequests:
    """The requests for input of the ranks of one request. The loop's thread puts them, another one gets them.

    The user talks to one rank at a time: requests of other ranks wait until its debugger lets the code go on.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[PendingInput] = []
        self._rank = -1
        self._talks = False
        self._closed = False

    def put(self, request: PendingInput) -> None:
        with self._changed:
            self._waiting.append(request)
            self._changed.notify_all()

    def goes_on(self, rank: int) -> None:
        """Note that the debugger of a rank has let the code go on."""
        with self._changed:
            if rank == self._rank:
                self._talks = False
                self._changed.notify_all()

    def gone(self, rank: int) -> None:
        """Note that a rank will not ask any more."""
        with self._changed:
            self._waiting = [asked for asked in self._waiting if asked.rank.rank != rank]
            if rank == self._rank:
                self._rank, self._talks = -1, False
                self._changed.notify_all()

    @property
    def is_asked(self) -> bool:
        """Whether there is a request that the user has not been asked yet."""
        with self._changed:
            return bool(self._waiting)

    def close(self) -> None:
        """Have `get` return None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def get(self, meanwhile: Callable[[], float] = lambda: math.inf) -> PendingInput | None:
        """Wait for the next request, and return it; None after `close`. For one thread only."""
        with self._changed:
            while True:
                self._wait_for(lambda: self._closed or bool(self._waiting), meanwhile)
                self._wait_for(lambda: not self._talks or self._has_more_of_same_rank(), meanwhile)
                self._changed.wait_for(lambda: self._rank < 0 or self._has_more_of_same_rank(), _NEXT_LINE_TIMEOUT)
                if self._closed:
                    return None
                if self._waiting:  # else the rank that asked has ended meanwhile
                    break
            request = min(self._waiting, key=lambda asked: (asked.rank.rank != self._rank, asked.rank.rank))
            self._waiting.remove(request)
            self._rank, self._talks = request.rank.rank, True
            return request

    def _wait_for(self, condition: Callable[[], bool], meanwhile: Callable[[], float]) -> None:
        while not condition():
            self._changed.release()  # what it calls may need what another thread holds that waits for this lock
            try:
                seconds = meanwhile()
            finally:
                self._changed.acquire()
            self._changed.wait_for(condition, min(seconds, _MAX_WAIT))

    def _has_more_of_same_rank(self) -> bool:
        return self._closed or any(asked.rank.rank == self._rank for asked in self._waiting)
