"""Check the processes of ranks for what sends no event: that one was suspended, or ended without a report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nb_accelerate.notebook.ranks.timeouts import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nb_accelerate.notebook.ranks.proxy import RankProxy

_INTERVAL_WHILE_ENDING = 0.1
"""Seconds between two checks while ranks are being ended."""


class ProcessWatch:
    """Checks the processes of ranks from time to time. The arguments are those of `RankLoop`."""

    def __init__(self, interval: float | None, monitor: Callable[[], object]) -> None:
        self._interval = NEVER if interval is None else interval
        self._monitor = monitor
        self.due = time.monotonic() + self._interval

    def check_soon(self) -> None:
        """Have the next check soon: ranks are being ended."""
        self.due = min(self.due, time.monotonic() + _INTERVAL_WHILE_ENDING)

    def check(self, ranks: Iterable[RankProxy], say: Callable[[str], object], *, is_ending: bool) -> list[RankProxy]:
        """Check the processes of ranks. Return those whose end nobody will report, and which were given up."""
        self.due = time.monotonic() + (min(_INTERVAL_WHILE_ENDING, self._interval) if is_ending else self._interval)
        self._monitor()
        lost = []
        for rank in ranks:
            if not is_ending and not rank.is_gone:
                note_if_stopped(rank, say)
            if not rank.is_gone and rank.handle.is_lost():
                rank.handle.give_up()
                lost.append(rank)
        return lost


def note_if_stopped(rank: RankProxy, say: Callable[[str], object]) -> None:
    """Note whether a rank is suspended, and say so if that has changed."""
    pid = rank.handle.pid
    if pid is None:
        return
    is_stopped = rank.handle.is_stopped()
    if is_stopped != rank.is_stopped:
        how = f"is stopped (SIGSTOP). To let it go on: kill -CONT {pid}" if is_stopped else "goes on"
        say(f"rank {rank.rank} {how}")
    rank.is_stopped = is_stopped
