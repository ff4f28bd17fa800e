"""Find out whether all ranks save together: scripts also call ``save_state`` on the main process only.

::

    main process                                 each other rank
    wait until all have come, or for a while     come: count up a key of the store; the first to do so decides
    close the keys of those that have not   <->  it was closed? then this save has gone on without this rank, or
    tell those that came what happens            it was one that this rank never called: try the next
    "together" -> collectives from here on       "alone" -> the main process saves by itself

No collective can be used to find out: those that are not here may be in one of the training already.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from nb_accelerate.board import Collective, here

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE = 15.0
"""Seconds that the main process waits for the others, which come together with it if they come at all."""

IMPATIENCE = 2.0
"""Seconds, once nobody has ever come to several saves: this script saves on the main process only."""

_SAVES_ALONE = 2
_PAUSE = 0.005


class Arrivals:
    """Which ranks came to which save. One belongs to each process group."""

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._next = 0  # the number of the next save, as this rank counts them
        self._missed = 0  # in a row, by all other ranks
        self._someone_came = False

    def are_complete(self, folder: str, whereabouts: Sequence[Any]) -> bool:
        """Return whether all ranks save to this folder now. Else only the main process is to save.

        Args:
            folder: which.
            whereabouts: of the loaders, which tell this save from others to the same folder.
        """
        board = here()
        before = board.wait_in(Collective.barrier)
        about = json.dumps([folder, list(whereabouts)])
        try:
            return self._wait_for_others(about) if self._rank == 0 else self._wait_for_main_process(about)
        finally:
            board.enter(before)

    def _wait_for_others(self, about: str) -> bool:
        others = range(1, self._world_size)
        number, self._next = self._next, self._next + 1
        is_alone = self._missed >= _SAVES_ALONE and not self._someone_came
        deadline = time.monotonic() + (IMPATIENCE if is_alone else PATIENCE)
        keys = [_key(number, rank) for rank in others]
        while not (complete := self._store.check(keys)) and time.monotonic() < deadline:
            time.sleep(_PAUSE)  # a store can be waited for, but not interrupted meanwhile
        came = list(others)
        if not complete:
            self._store.set(f"{number}/closed", about)
            came = [rank for rank in others if self._store.add(_key(number, rank), 1) > 1]
        complete = len(came) == len(others)
        for rank in came:
            self._store.set(f"{_key(number, rank)}/answer", "together" if complete else "alone")
        self._missed = 0 if came else self._missed + 1
        self._someone_came |= bool(came)
        return complete

    def _wait_for_main_process(self, about: str) -> bool:
        while True:
            number, self._next = self._next, self._next + 1
            key = _key(number, self._rank)
            if self._store.add(key, 1) == 1:
                break
            if self._store.get(f"{number}/closed").decode() == about:
                return False
        answer = f"{key}/answer"
        while not self._store.check([answer]):
            time.sleep(_PAUSE)
        complete: bool = self._store.get(answer) == b"together"
        for used in (key, answer):
            self._store.delete_key(used)
        return complete


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
        _of_groups[group] = Arrivals(dist.get_rank(), dist.get_world_size(), store)
    return _of_groups[group]
