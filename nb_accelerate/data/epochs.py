"""Count a loader's epochs, and tell samplers and datasets that shuffle by the epoch which one comes."""

from __future__ import annotations

import contextlib
import random
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


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
        self._reader: weakref.ref[Any] | None = None  # or a loader that was dropped would keep its workers
        self.listen(*things)

    @property
    def reader(self) -> Any:
        """The loader that began an epoch last; None since the epoch was set, or if the loader is no more."""
        return None if self._reader is None else self._reader()

    def begins(self, reader: Any) -> None:
        """A loader begins an epoch."""
        self.epoch += 1
        self._reader = weakref.ref(reader)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_reader": None}

    def listen(self, *things: Any) -> None:
        """Tell these from now on, and those inside of them, instead of the ones told before."""
        self._listeners = _listeners(things)
        self._told: list[Any] = [getattr(one, "epoch", None) for one in self._listeners]

    def set(self, epoch: int) -> None:
        """Start again from ``epoch``, and tell everyone."""
        self.epoch = epoch
        self._reader = None
        for index, one in enumerate(self._listeners):
            one.set_epoch(epoch)
            self._told[index] = getattr(one, "epoch", None)

    def announce(self) -> None:
        """Tell everyone which epoch comes, except those who were told by someone else or count by themselves."""
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
def numbers_kept(*, when: bool = True) -> Iterator[None]:
    """Give the random numbers of Python, numpy and torch, on the CPU, their states back at the end of a block.

    Args:
        when: whether to do so at all.
    """
    if not when:
        yield
        return
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
