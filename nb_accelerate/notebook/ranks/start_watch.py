"""Wait for ranks that start as long as they make progress: imports take minutes on a busy machine or a slow disk."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import psutil

from nb_accelerate.base.topology.rank_lists import label, named
from nb_accelerate.notebook.ranks.timeouts import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.notebook.ranks.proxy import RankProxy

_LOOKS = 12  # how often ranks are looked at in the seconds in which they must make progress

# Work in a second that is progress; see `RankHandle.starting`. A rank that waits for others wakes up now and then.
_LEAST_SHARE = 0.01


class StartWatch:
    """Tells when ranks that start have made no progress for some seconds. The loop's thread calls `act` when it is due.

    Args:
        starting: returns the ranks that have not started yet.
        say: shows a line, once, when the start takes longer than these seconds.
    """

    def __init__(
        self, seconds: float, starting: Callable[[], Sequence[RankProxy]], say: Callable[[str], object]
    ) -> None:
        self._seconds = seconds
        self._starting = starting
        self._say = say
        self._work = 0.0
        self._looked_at = now = time.monotonic()
        self._say_at = self._ends = now + seconds
        # Most starts end before the first look, which reads the table of processes.
        self.due = now + seconds / _LOOKS

    def act(self) -> bool:
        """Look at the ranks, and return whether their time is over."""
        now, before = time.monotonic(), self._work
        self._work = sum(rank.handle.starting()[0] for rank in self._starting())
        if self._work - before > _LEAST_SHARE * (now - self._looked_at):
            self._ends = now + self._seconds
        self._looked_at = now
        self.due = now + self._seconds / _LOOKS
        if now >= self._say_at and now < self._ends:
            self._say_at = NEVER
            ranks = [rank.rank for rank in self._starting()]
            self._say(
                f"{named(ranks)} still start{'s' * (len(ranks) == 1)} after {self._seconds:g} s ({self.where()}). This "
                "is waited for as long as it takes processor time or reads files; interrupt to end it"
            )
        return now >= self._ends

    def where(self) -> str:
        """Return where the ranks are: ``importing torch``, or ``rank 0: importing torch; rank 1: being set up``."""
        places: dict[str, list[int]] = {}
        for rank in self._starting():
            places.setdefault(rank.handle.starting()[1], []).append(rank.rank)
        if len(places) == 1:
            return next(iter(places))
        return "; ".join(f"{label(ranks)}: {place}" for place, ranks in places.items())


def work_of(pid: int) -> float:
    """Return what a process and its children have done: seconds of a processor, and megabytes read from files."""
    work = 0.0
    with contextlib.suppress(psutil.Error):  # one has just ended
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            work += sum(member.cpu_times()[:4])
            if hasattr(member, "io_counters"):  # not on macOS
                read = member.io_counters()
                work += max(read.read_bytes, read.read_chars) / 1e6
    return work
