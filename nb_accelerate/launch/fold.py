"""Equal lines of several ranks, shown once.

Most of what ranks print is the same on all of them. Lines are compared one for one, in the order each rank printed
them: a line that every rank has printed is passed on once. A line that the others have not printed, or not within
a moment, is passed on alone, with its rank in front.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.protocol.output import StreamName

_HOLD = 0.3
"""Seconds a line waits for the other ranks'. Ranks in step are milliseconds apart."""


class Fold:
    """Sits between the ranks' outputs and a sink.

    Args:
        ranks: their numbers.
        write: takes a stream's name and whole lines.
    """

    def __init__(self, ranks: list[int], write: Callable[[StreamName, str], None]) -> None:
        self._write = write
        self._waiting: dict[StreamName, dict[int, deque[tuple[float, str]]]] = {
            stream: {rank: deque() for rank in ranks} for stream in ("stdout", "stderr")
        }

    def add(self, rank: int, stream: StreamName, text: str) -> None:
        """Lines of a rank."""
        now = time.monotonic()
        # Not splitlines(), which also ends a line at a carriage return.
        self._waiting[stream][rank].extend((now, line + "\n") for line in text.removesuffix("\n").split("\n"))
        self._match(stream)

    @property
    def due(self) -> float:
        """When `flush` has something to do, as `time.monotonic`."""
        heads = [queue[0][0] for queues in self._waiting.values() for queue in queues.values() if queue]
        return min(heads) + _HOLD if heads else float("inf")

    def flush(self, *, everything: bool = False) -> None:
        """Pass on what has waited long enough."""
        limit = float("inf") if everything else time.monotonic() - _HOLD
        for stream, queues in self._waiting.items():
            while True:
                self._match(stream)
                late = [rank for rank, queue in queues.items() if queue and queue[0][0] <= limit]
                if not late:
                    break
                for rank in late:  # one line of each, so that what follows is compared with its like
                    self._write(stream, f"[rank {rank}] {queues[rank].popleft()[1]}")

    def _match(self, stream: StreamName) -> None:
        queues = self._waiting[stream].values()
        while all(queues) and len({queue[0][1] for queue in queues}) == 1:
            lines = [queue.popleft()[1] for queue in queues]
            self._write(stream, lines[0])
