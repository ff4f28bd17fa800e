"""Tell when ranks wait forever for others that have come to the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nb_accelerate.diagnostics.stacks import main_thread
from nb_accelerate.diagnostics.waits import who_waits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.protocol.messages import Frame
    from nb_accelerate.ranks.request import Request

_IDLE_SHARE = 0.05
"""Part of its time that a rank which only waits spends on a processor, at most. Its threads wake up now and then."""

_IDLE_SECONDS = 0.05
"""Seconds on a processor that do not count, for short times."""

_JOINS_GROUPS = ("init_process_group", "new_group")
"""Functions of torch.distributed in which a rank may also wait for processes that are none of its launch."""


class DeadlockWatch:
    """Measures how long nothing can have come of what the ranks of a request wait for.

    That is so while some ranks have come to the end and all others stay in the same collectives, and spend no processor
    time, as they would to transfer data or to compute a backward. A wait for work of a GPU takes processor time too. If
    the request has ranks of other machines, nothing is known of those, and the time is 0.

    Args:
        request: one that has begun.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._since: float | None = None
        self._places: dict[int, tuple[Frame, ...]] = {}
        self._used: dict[int, float | None] = {}

    def moved(self) -> None:
        """Note that a rank has made progress."""
        self._since = None

    def look(self, dumps: Mapping[int, str]) -> float | None:
        """Return for how many seconds it has been so; None if it is not, or cannot be told now.

        Args:
            dumps: stacks of the ranks that have not come to the end, by rank. "" is none: a busy machine answers late.
        """
        if "" in dumps.values():
            return None
        now = time.monotonic()
        places = {rank: main_thread(dump) for rank, dump in dumps.items()}
        used = {one.rank: one.handle.processor_time() for one in self._request.waiting}
        if not self._can_be(dumps, places):
            self._since = None
        elif self._since is None or places != self._places or not self._are_idle(used, now - self._since):
            self._since, self._places, self._used = now, places, used
        return None if self._since is None else now - self._since

    def _can_be(self, dumps: Mapping[int, str], places: Mapping[int, tuple[Frame, ...]]) -> bool:
        request = self._request
        return (
            len(request.ranks) == request.world_size
            and bool(request.answers)
            and who_waits(dumps).waits
            and not any(frame.name in _JOINS_GROUPS for frames in places.values() for frame in frames)
        )

    def _are_idle(self, used: Mapping[int, float | None], seconds: float) -> bool:
        allowed = _IDLE_SHARE * seconds + _IDLE_SECONDS
        return all(
            after is not None and (before := self._used.get(rank)) is not None and after - before <= allowed
            for rank, after in used.items()
        )
