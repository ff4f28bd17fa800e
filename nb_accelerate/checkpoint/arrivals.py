"""Find out whether all ranks save together: scripts also call ``save_state`` on the main process only.

::

    main process                                 each other rank
    wait until all have come, or cannot any more come: count up a key of the store; the first to do so decides
    close the keys of those that have not   <->  it was closed? then this save has gone on without this rank, or
    tell those that came what happens            it was one that this rank never called: try the next
    "together" -> collectives from here on       "alone" -> the main process saves by itself

No collective can be used to find out: those that are not here may be in one of the training already. Which of them
cannot come any more is known to `nb_accelerate.checkpoint.presence`: a rank that is late, by hours too, is waited for.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from nb_accelerate.checkpoint.presence import OtherRanks
from nb_accelerate.errors import CheckpointError
from nb_accelerate.progress_page import Collective, here
from nb_accelerate.topology.rank_lists import named

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

logger = logging.getLogger("nb_accelerate")

_ASK_AFTER = 0.3
"""Seconds that the main process waits for others until it asks them where they are."""

_ASK_EVERY = 0.1
"""Seconds between two looks at what they answer."""

_TELL_AFTER, _TELL_EVERY = 15.0, 30.0
"""Seconds after which it is said first, and again, who is late."""

_CAME_LATE = "came late"  # a key of the store: a rank has come to a save that had gone on without it
_PAUSE = 0.005  # seconds between two looks for a key of the store: a wait for it could not be interrupted


class Arrivals:
    """Knows which ranks came to which save. One belongs to each process group.

    Args:
        rank: of this process.
        world_size: how many there are.
        store: that all of them share.
        other_ranks: who tells which ranks cannot come any more.
        timeout: in seconds, see the attribute.

    Attributes:
        timeout: seconds for which ranks are waited for that tell nothing about themselves. May be changed.
    """

    def __init__(self, rank: int, world_size: int, store: Any, other_ranks: OtherRanks, timeout: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._other_ranks = other_ranks
        self.timeout = timeout
        self._next = 0  # the number of the next save, as this rank counts them
        self._someone_came = False

    def are_complete(self, folder: str, positions: Sequence[Any]) -> bool:
        """Return whether all ranks save to this folder now. Else only the main process is to save.

        Args:
            folder: which.
            positions: of the loaders, which tell this save from others to the same folder.

        Raises:
            CheckpointError: ranks that are known to save too did not come in time. The others raise it as well.
        """
        page = here()
        before = page.wait_in(Collective.barrier)
        about = json.dumps([folder, list(positions)])
        try:
            return self._wait_for_others(about) if self._rank == 0 else self._wait_for_main_process(about)
        finally:
            page.enter(before)

    def _wait_for_others(self, about: str) -> bool:
        others = range(1, self._world_size)
        number, self._next = self._next, self._next + 1
        self._someone_came |= bool(self._store.check([_CAME_LATE]))
        why = self._wait_until_all_come_or_cannot(number, others)
        came = list(others)
        if why:
            self._store.set(f"{number}/closed", about)
            came = [rank for rank in others if self._store.add(_key(number, rank), 1) > 1]
        complete = len(came) == len(others)
        # One that has come once, now or before, says that this script saves on all of them.
        saves_alone = why == _ELSEWHERE and not came and not self._someone_came
        answer = "together" if complete else "alone" if saves_alone else "late"
        for rank in came:
            self._store.set(f"{_key(number, rank)}/answer", answer)
        self._someone_came |= bool(came)
        if answer == "late":
            raise CheckpointError(_LATE.format(named([rank for rank in others if rank not in came]), why))
        return complete

    def _wait_until_all_come_or_cannot(self, number: int, others: Iterable[int]) -> str:
        """Return why those that have not come will not; "" if all have."""
        began = time.monotonic()
        ask_at, tell_at = began + _ASK_AFTER, began + _TELL_AFTER
        try:
            while missing := [rank for rank in others if not self._store.check([_key(number, rank)])]:
                now = time.monotonic()
                if now >= ask_at:
                    self._other_ranks.start_asking()
                    ask_at = now + _ASK_EVERY
                    if killed := self._other_ranks.killed(missing):
                        return f": {self._other_ranks.how_they_ended(killed)}"
                    if len(self._other_ranks.will_not_come(missing)) == len(missing):
                        return _ELSEWHERE
                    if now - began >= self.timeout and not self._other_ranks.any_reports(missing):
                        return f" within {now - began:.0f} s"
                if now >= tell_at:
                    tell_at = now + _TELL_EVERY
                    logger.warning("save_state has waited %.0f s for %s.", now - began, named(missing))
                time.sleep(_PAUSE)
        finally:
            self._other_ranks.stop_asking()
        return ""

    def _wait_for_main_process(self, about: str) -> bool:
        while True:
            number, self._next = self._next, self._next + 1
            key = _key(number, self._rank)
            if self._store.add(key, 1) == 1:
                break
            if self._store.get(f"{number}/closed").decode() == about:
                if self._someone_came:
                    raise CheckpointError(_LATE.format(f"rank {self._rank}", " in time"))
                self._store.set(_CAME_LATE, b"")
                return False
        answer = f"{key}/answer"
        look_at = time.monotonic() + _ASK_AFTER
        while not self._store.check([answer]):
            if time.monotonic() >= look_at:
                look_at += _ASK_AFTER
                if self._other_ranks.killed([0]):
                    raise CheckpointError(_LATE.format("rank 0", f": {self._other_ranks.how_they_ended([0])}"))
            time.sleep(_PAUSE)
        told = self._store.get(answer)
        for used in (key, answer):
            self._store.delete_key(used)
        if told == b"late":
            raise CheckpointError(_LATE.format("another rank", ""))
        self._someone_came |= told == b"together"
        return bool(told == b"together")


_ELSEWHERE = ", but waits elsewhere or has come to the end"
"""Why ranks will not come that go on with the program."""

_LATE = (
    "{} did not come to save_state{}, and nothing was saved: without all ranks a run cannot go on as it was. Every "
    "rank has to call it, at the same point of the program."
)


def _key(number: int, rank: int) -> str:
    return f"{number}/{rank}"


_of_groups: WeakKeyDictionary[Any, Arrivals] = WeakKeyDictionary()


def arrivals_here() -> Arrivals | None:
    """Return those of the process group that this process is in; None if it is in none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD
    if group not in _of_groups:
        # The only store that all ranks are sure to share.
        whole = dist.distributed_c10d._get_default_store()  # noqa: SLF001
        store = dist.PrefixStore("nb_accelerate/saves", whole)  # type: ignore[attr-defined]
        timeout = whole.timeout.total_seconds()  # type: ignore[attr-defined]  # that of the group; no stub
        _of_groups[group] = Arrivals(dist.get_rank(), dist.get_world_size(), store, OtherRanks(group, whole), timeout)
    return _of_groups[group]
