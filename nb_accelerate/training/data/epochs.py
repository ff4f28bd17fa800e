"""Count the epochs of a loader, and call ``set_epoch`` of its samplers and datasets."""

from __future__ import annotations

import contextlib
import random
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

from nb_accelerate.training.data.iterable import IterableDatasetShard
from nb_accelerate.training.data.reader import ReadState
from nb_accelerate.training.data.samplers import PassesEpochOn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nb_accelerate.training.data.orders import Order
    from nb_accelerate.training.data.plan import GroupRows
    from nb_accelerate.training.data.reader import Reader


class EpochProgress:
    """The progress of one epoch of a loader: all that belongs to one iteration, and not to the loader.

    Args:
        position: batches that were left out at its beginning.
        epoch: its number, from 0.

    Attributes:
        position: batches that were handed out or left out so far; 0 when it is over.
        read_state: the state of reading after the batch that was handed out last.
        loader: the loader that is iterated; None before and after.
        outer: the epoch of the same data in whose loop this one began, if it did.
        end_of_dataloader: whether the batch that was handed out last is the last.
        rows: of the group of the current batch; None if that is complete, or not known to be incomplete.
        began: the random numbers that its order was drawn from; None if they are not known.
    """

    def __init__(self, reader: Reader, position: int, epoch: int = 0) -> None:
        self.reader = reader
        self.position = position
        self.epoch = epoch
        self.read_state = ReadState()
        self.loader: Any = None
        self.outer: EpochProgress | None = None
        self.end_of_dataloader = False
        self.rows: GroupRows | None = None
        self.began: Mapping[str, Any] | None = None

    @property
    def is_running(self) -> bool:
        """Whether its loop has begun and has not been left."""
        return self.loader is not None

    @property
    def remainder(self) -> int:
        """Real rows in the last batch of all ranks together; 0 if all are real, -1 if not known."""
        return -1 if self.rows is None else self.rows.real or 0

    @property
    def is_uneven(self) -> bool:
        """Whether it is known that ranks will have, or have, different numbers of rows."""
        if self.reader.even:
            return False
        return self.reader.is_uneven or (self.rows is not None and self.rows.real is not None)


class EpochCounter:
    """Counts the epochs of a loader and of those that `DataLoaderAdapter.skipping` made of it.

    Args:
        *things: the loader's samplers and dataset. ``set_epoch`` is called of those that have it, and of samplers
            inside them.

    Attributes:
        epoch: which one comes next, from 0.
        saved: the epoch of a position that was loaded, and what draws its order; None if none was.
    """

    def __init__(self, *things: Any) -> None:
        self.epoch = 0
        self.saved: tuple[int, Order] | None = None
        self._part: _Part | None = None
        self._current: weakref.ref[EpochProgress] | None = (
            None  # a strong reference would keep the workers of a dropped loader
        )
        self.listen(*things)

    @property
    def current(self) -> EpochProgress | None:
        """The epoch that was begun last; None after `set`, or when its loader was garbage-collected."""
        return None if self._current is None else self._current()

    @property
    def saved_order(self) -> Order | None:
        """What draws the order of the epoch that comes next, if a position in the middle of it was loaded."""
        epoch, order = self.saved or (None, None)
        return order if epoch == self.epoch and order is not None and order.began is not None else None

    def begins(self, current: EpochProgress) -> None:
        """Count an epoch that begins."""
        around = self.current
        while around is not None and not around.is_running:
            around = around.outer
        current.outer = around
        self.epoch += 1
        self._current = weakref.ref(current)

    def ends(self, current: EpochProgress) -> None:
        """Go on in the epoch in whose loop one has ended, or was left. Without one, that one stays the current."""
        around = current.outer
        while around is not None and not around.is_running:
            around = around.outer
        if around is not None and self.current is current:
            self._current = weakref.ref(around)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_current": None}

    def listen(self, *things: Any) -> None:
        """Replace the samplers and datasets whose ``set_epoch`` is called."""
        self._listeners = _listeners(things)
        self._told = [_epochs_in(one) for one in self._listeners]

    def follow(self, whole: Any, part: Any) -> None:
        """Have this rank's part of a dataset be in the epoch of the whole one, of which users may call ``set_epoch``.

        Args:
            whole: the user's. Nothing is done if it, or the part, does not say in which epoch it is.
            part: what the loader reads instead; users may call its ``set_epoch`` as well.
        """
        if part is not whole and all(hasattr(one, "set_epoch") and hasattr(one, "epoch") for one in (whole, part)):
            self.listen(*(whole if one is part else one for one in self._listeners))
            self._part = _Part(whole, part)

    def set(self, epoch: int) -> None:
        """Set the epoch that comes next, here and in all samplers and datasets."""
        self.epoch = epoch
        self._current = None
        for index in range(len(self._listeners)):
            self._tell(index)
        if self._part is not None:
            self._part.push()

    def announce(self) -> None:
        """Call ``set_epoch``, except of samplers and datasets whose epoch was changed by others, or by themselves."""
        if self._part is not None:
            self._part.pull()
        for index, one in enumerate(self._listeners):
            if self.epoch and _epochs_in(one) == self._told[index]:  # the first epoch is what they were made for
                self._tell(index)
        if self._part is not None:
            self._part.push()

    def _tell(self, index: int) -> None:
        one = self._listeners[index]
        one.set_epoch(self.epoch)
        self._told[index] = _epochs_in(one)


class _Part:
    """A rank's part of a dataset, and the whole one."""

    def __init__(self, whole: Any, part: Any) -> None:
        self._whole = whole
        self._part = part
        self._epoch = part.epoch  # in which the part was left

    def pull(self) -> None:
        """Set the epoch of the whole dataset to that of the part, if it was the part's that was set."""
        if self._part.epoch != self._epoch:
            self._whole.set_epoch(self._part.epoch)

    def push(self) -> None:
        """Set the epoch of the part to that of the whole dataset."""
        self._part.set_epoch(self._whole.epoch)
        self._epoch = self._part.epoch


def _epochs_in(thing: Any) -> list[Any]:
    """Return the values by which a sampler or dataset says in which epoch it is."""
    inside = vars(thing) if hasattr(thing, "__dict__") else {}
    known = [value for name, value in inside.items() if "epoch" in name and isinstance(value, int)]
    return [getattr(thing, "epoch", None), *known]


def _listeners(things: tuple[Any, ...]) -> list[Any]:
    found: list[Any] = []
    seen: set[int] = set()
    queue = list(things)
    while queue:
        thing = queue.pop(0)
        if isinstance(thing, IterableDatasetShard):
            thing = thing.dataset
        if thing is None or id(thing) in seen:
            continue
        seen.add(id(thing))
        passes_on = isinstance(thing, PassesEpochOn) or type(thing) is BatchSampler
        if not passes_on and callable(getattr(thing, "set_epoch", None)):
            found.append(thing)
        inner = vars(thing) if hasattr(thing, "__dict__") else {}
        queue += [inner[name] for name in ("batch_sampler", "sampler") if name in inner]
    return found


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the random states of Python, numpy and torch, on the CPU, at the end of a block."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
