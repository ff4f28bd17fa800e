"""Tell when ranks wait for ever: for others that have come to the end, or do not run this, and cannot come any more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nb_accelerate.notebook.diagnostics.stacks import has_one_thread, in_exchange, main_thread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.notebook.protocol.messages import Frame
    from nb_accelerate.notebook.ranks.proxy import RankProxy
    from nb_accelerate.notebook.ranks.request import Request

_MAX_PROCESSOR_SHARE = 0.05
"""Part of its time that a rank which only waits spends on a processor, at most. Its threads wake up now and then."""

_MAX_PROCESSOR_SECONDS = 0.05
"""Seconds on a processor that do not count, for short times."""


class DeadlockWatch:
    """Measures for how long the ranks of a request have been deadlocked.

    They are if each rank of the group either waits in a collective or runs no code of users, if no thread of users
    lives in any of them, and if no process of any rank uses a processor, wants one or reads a disk, as a backward
    would. Where a thread lives, or two ranks wait in different collectives, a program may be right: it is not ended.

    It is not measured with ranks on other machines, in a group that may have processes of another launch, or where
    ranks use devices: waits for those may take no time of a processor.
    """

    def __init__(self, request: Request, *, longest: float) -> None:
        self._request = request
        self._longest = longest
        self._seconds = 0.0
        self._measured_at: float | None = None
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        self._used: dict[int, float | None] = {}

    def moved(self) -> None:
        """Note that a rank has made progress."""
        self._seconds, self._measured_at, self._stacks = 0.0, None, {}

    def measure(self, dumps: Mapping[int, str], others: Sequence[RankProxy]) -> float | None:
        """Return the seconds since the deadlock began; None if there is none, or a rank has not sent its stacks.

        Args:
            dumps: stacks of the ranks that have not come to the end. "" is none: a busy machine answers late.
        """
        stacks = [
            *dumps.values(),
            *(rank.dump for rank in others if not rank.is_gone),
        ]
        if "" in stacks:
            self._measured_at = None
            return None
        if not self._can_be(dumps, others) or not all(map(has_one_thread, stacks)):
            self.moved()
            return None
        now = time.monotonic()
        since_last = 0.0 if self._measured_at is None else min(now - self._measured_at, self._longest)
        stacks_by_rank = {rank: main_thread(dump) for rank, dump in dumps.items()}
        used = {rank.rank: rank.handle.processor_time() for rank in (*self._request.waiting, *others)}
        if stacks_by_rank == self._stacks and self._are_idle(used, self._seconds + since_last):
            self._seconds += since_last
        else:
            self._seconds, self._stacks, self._used = 0.0, stacks_by_rank, used
        self._measured_at = now
        return self._seconds

    def _can_be(self, dumps: Mapping[int, str], others: Sequence[RankProxy]) -> bool:
        request = self._request
        return (
            request.on_host
            and bool(dumps and others)
            and len(dumps) + len(others) == request.world_size
            and all(in_exchange(dump, or_backward=True) for dump in dumps.values())
            and not any(
                rank.handle.is_stopped() or rank.handle.page.read().other_group for rank in (*request.ranks, *others)
            )
        )

    def _are_idle(self, used: Mapping[int, float | None], seconds: float) -> bool:
        allowed = _MAX_PROCESSOR_SHARE * seconds + _MAX_PROCESSOR_SECONDS
        return all(
            after is not None and (before := self._used.get(rank)) is not None and 0.0 <= after - before <= allowed
            for rank, after in used.items()
        )
