"""Count a loader's epochs, and tell samplers and datasets that shuffle by the epoch which one comes."""

from __future__ import annotations

import contextlib
import random
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nb_accelerate.data.reader import Reached

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.data.reader import Reader


class Pass:
    """One epoch of a loader, as far as it has come.

    Args:
        reader: reads it.
        position: batches that were left out at its beginning.

    Attributes:
        position: batches that were handed out or left out so far; 0 when it is over.
        reached: where reading was after the batch that was handed out last.
    """

    __slots__ = ("__weakref__", "position", "reached", "reader")

    def __init__(self, reader: Reader, position: int) -> None:
        self.reader = reader
        self.position = position
        self.reached = Reached()


class EpochCounter:
    """Epochs of a loader, and of those that read from the same samplers.

    Args:
        *things: the loader's samplers and dataset. They are searched for samplers and datasets inside; those that
            have a ``set_epoch`` are told.

    Attributes:
        epoch: which one comes next, from 0.
    """

    def __init__(self, *things: Any) -> None:
        self.epoch = 0
        self._current: weakref.ref[Pass] | None = None  # or a loader that was dropped would keep its workers
        self.listen(*things)

    @property
    def current(self) -> Pass | None:
        """The epoch that was begun last; None since the epoch was set, or if its loader is no more."""
        return None if self._current is None else self._current()

    def begins(self, current: Pass) -> None:
        """Count an epoch that begins."""
        self.epoch += 1
        self._current = weakref.ref(current)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_current": None}

    def listen(self, *things: Any) -> None:
        """Tell samplers and datasets from now on, and those inside of them, instead of the ones before.

        Args:
            *things: those of the loader.
        """
        self._listeners = _listeners(things)
        self._told: list[Any] = [getattr(one, "epoch", None) for one in self._listeners]

    def set(self, epoch: int) -> None:
        """Count from ``epoch`` on, and tell all samplers and datasets."""
        self.epoch = epoch
        self._current = None
        for index, one in enumerate(self._listeners):
            one.set_epoch(epoch)
            self._told[index] = getattr(one, "epoch", None)

    def announce(self) -> None:
        """Tell samplers and datasets which epoch comes, except those that others told or that count by themselves."""
        if not self.epoch:
            return  # the first epoch is what they were made for
        for index, one in enumerate(self._listeners):
            if getattr(one, "epoch", None) == self._told[index]:
                one.set_epoch(self.epoch)
                self._told[index] = getattr(one, "epoch", None)


def _listeners(things: tuple[Any, ...]) -> list[Any]:
    found: list[Any] = []
    seen: set[int] = set()
    queue = list(things)
    while queue:
        thing = queue.pop(0)
        if thing is None or id(thing) in seen:
            continue
        seen.add(id(thing))
        if callable(getattr(thing, "set_epoch", None)):
            found.append(thing)
        inner = vars(thing) if hasattr(thing, "__dict__") else {}
        queue += [inner[name] for name in ("batch_sampler", "sampler") if name in inner]
    return found


@contextlib.contextmanager
def numbers_kept() -> Iterator[None]:
    """Restore the random states of Python, numpy and torch, on the CPU, at the end of a block."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
