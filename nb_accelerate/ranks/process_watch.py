"""Looks at the processes of ranks for what sends no event: a process that was suspended, an end nobody tells of."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nb_accelerate.ranks.timeouts import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nb_accelerate.ranks.proxy import RankProxy

_WHILE_ENDING = 0.1
"""Seconds between two looks while ranks are being ended."""


class ProcessWatch:
    """Lives in the loop's thread. Call `look` when it is `due`.

    Args:
        interval: seconds between two looks; None looks only while ranks are being ended.
        also: called at each look.

    Attributes:
        due: as `time.monotonic`.
    """

    def __init__(self, interval: float | None, also: Callable[[], object]) -> None:
        self._interval = NEVER if interval is None else interval
        self._also = also
        self.due = time.monotonic() + self._interval

    def look_soon(self) -> None:
        """Take note that ranks are being ended."""
        self.due = min(self.due, time.monotonic() + _WHILE_ENDING)

    def look(self, ranks: Iterable[RankProxy], say: Callable[[str], object], *, is_ending: bool) -> list[RankProxy]:
        """Look at all processes.

        Args:
            ranks: that were started.
            say: takes a line about one that was suspended, or goes on.
            is_ending: ranks are being ended: whether they are suspended does not matter any more.

        Returns:
            Ranks that have ended without anybody telling; nobody waits for their processes any more.
        """
        self.due = time.monotonic() + (min(_WHILE_ENDING, self._interval) if is_ending else self._interval)
        self._also()
        lost = []
        for rank in ranks:
            if not is_ending and not rank.is_gone:
                look_whether_stopped(rank, say)
            if not rank.is_gone and rank.handle.is_lost():
                rank.handle.give_up()
                lost.append(rank)
        return lost


def look_whether_stopped(rank: RankProxy, say: Callable[[str], object]) -> None:
    """Note whether a rank is suspended, and report it if that has changed.

    Args:
        rank: to look at.
        say: takes the line.
    """
    pid = rank.handle.pid
    if pid is None:
        return
    is_stopped = rank.handle.is_stopped()
    if is_stopped != rank.is_stopped:
        how = f"is stopped (SIGSTOP). To let it go on: kill -CONT {pid}" if is_stopped else "goes on"
        say(f"rank {rank.rank} {how}")
    rank.is_stopped = is_stopped
