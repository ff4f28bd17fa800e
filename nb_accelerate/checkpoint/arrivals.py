"""Find out whether all ranks save together: scripts also call ``save_state`` on the main process only.

::

    main process                                 each other rank
    wait until all have come, name who is late   come: count up a key of the store; the first to do so decides
    close the keys of those that have not   <->  it was closed? then this save has gone on without this rank, or
    tell those that came what happens            it was one that this rank never called: try the next
    "together" -> collectives from here on       "alone" -> the main process saves by itself

No collective can be used to find out: those that are not here may be in one of the training already.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from nb_accelerate.errors import CheckpointError
from nb_accelerate.progress_page import Collective, here

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger("nb_accelerate")

ALONE_TIMEOUT = 15.0
"""Seconds that the main process waits for others if none has ever come to a save: then it saves alone, and says so."""

REPEATED_ALONE_TIMEOUT = 2.0
"""The same, in seconds, once it has saved alone `_SAVES_ALONE` times: this script saves on the main process only."""

_SAVES_ALONE = 2
_TELL_EVERY = 30.0  # seconds after which it is said again who is late
_CAME_LATE = "came late"  # a key of the store: a rank has come to a save that had gone on without it
_PAUSE = 0.005  # seconds between two looks for a key of the store: a wait for it could not be interrupted


class Arrivals:
    """Knows which ranks came to which save. One belongs to each process group.

    Args:
        rank: of this process.
        world_size: how many there are.
        store: that all of them share.
        timeout: in seconds, see the attribute.

    Attributes:
        timeout: seconds for which ranks are waited for that are known to save too. May be changed.
    """

    def __init__(self, rank: int, world_size: int, store: Any, timeout: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self.timeout = timeout
        self._next = 0  # the number of the next save, as this rank counts them
        self._missed = 0  # in a row, by all other ranks
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
        keys = [_key(number, rank) for rank in others]
        began = time.monotonic()
        tell_at = began + ALONE_TIMEOUT
        complete = False
        self._someone_came |= bool(self._store.check([_CAME_LATE]))
        while not (complete := self._store.check(keys)):
            now = time.monotonic()
            missing = [rank for rank in others if not self._store.check([_key(number, rank)])]
            # One that has come once, now or before, says that this script saves on all of them.
            all_save = self._someone_came or len(missing) < len(others)
            alone = REPEATED_ALONE_TIMEOUT if self._missed >= _SAVES_ALONE else ALONE_TIMEOUT
            if now - began >= (self.timeout if all_save else alone):
                break
            if all_save and now >= tell_at:
                tell_at = now + _TELL_EVERY
                logger.warning("save_state has waited %.0f s for %s.", now - began, _named(missing))
            time.sleep(_PAUSE)
        came = list(others)
        if not complete:
            self._store.set(f"{number}/closed", about)
            came = [rank for rank in others if self._store.add(_key(number, rank), 1) > 1]
        complete = len(came) == len(others)
        is_late = not complete and (self._someone_came or bool(came))
        answer = "together" if complete else "late" if is_late else "alone"
        for rank in came:
            self._store.set(f"{_key(number, rank)}/answer", answer)
        self._missed = 0 if came else self._missed + 1
        self._someone_came |= bool(came)
        if is_late:
            late = [rank for rank in others if rank not in came]
            raise CheckpointError(_LATE.format(_named(late), f" within {time.monotonic() - began:.0f} s"))
        return complete

    def _wait_for_main_process(self, about: str) -> bool:
        while True:
            number, self._next = self._next, self._next + 1
            key = _key(number, self._rank)
            if self._store.add(key, 1) == 1:
                break
            if self._store.get(f"{number}/closed").decode() == about:
                if self._someone_came:
                    raise CheckpointError(_LATE.format(f"rank {self._rank}", ""))
                self._store.set(_CAME_LATE, b"")
                return False
        answer = f"{key}/answer"
        while not self._store.check([answer]):
            time.sleep(_PAUSE)
        told = self._store.get(answer)
        for used in (key, answer):
            self._store.delete_key(used)
        if told == b"late":
            raise CheckpointError(_LATE.format("another rank", ""))
        self._someone_came |= told == b"together"
        return bool(told == b"together")


_LATE = (
    "{} did not come to save_state{}, and nothing was saved: without all ranks a run cannot go on as it was. Every "
    "rank has to call it, at the same point of the program."
)


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


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
        _of_groups[group] = Arrivals(dist.get_rank(), dist.get_world_size(), store, timeout)
    return _of_groups[group]
