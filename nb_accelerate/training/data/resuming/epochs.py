"""Count the epochs of a loader, and call ``set_epoch`` of its samplers and datasets."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler
from typing_extensions import override

from nb_accelerate.training.data.loops import RunningLoop
from nb_accelerate.training.data.plan.samplers import PassesEpochOn
from nb_accelerate.training.data.reading.iterable import IterableDatasetShard
from nb_accelerate.training.data.reading.reader import ReadState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.training.data.reading.reader import Reader
    from nb_accelerate.training.data.resuming.orders import Order


class EpochProgress(RunningLoop):
    """The progress of one epoch of a loader: all that belongs to one iteration, and not to the loader."""

    def __init__(self, reader: Reader, position: int, epoch: int = 0) -> None:
        self.reader = reader
        self.position = position  # batches that were handed out or left out so far; 0 when it is over
        self.epoch = epoch
        self.read_state = ReadState()  # after the batch that was handed out last
        self.outer: EpochProgress | None = None  # of the same data, in whose loop this one began
        self.began: Mapping[str, Any] | None = None  # the random numbers that its order was drawn from, if known

    @property
    def is_running(self) -> bool:
        """Whether its loop has begun and has not been left."""
        return self.loader is not None

    @property
    @override
    def is_uneven(self) -> bool:
        if self.reader.even:
            return False
        return self.reader.is_uneven or (self.rows is not None and self.rows.real is not None)


class EpochCounter:
    """Counts the epochs of a loader and of loaders that `DataLoaderAdapter.skipping` made of it.

    It calls ``set_epoch`` of the loader's samplers and dataset, if they have it, and of samplers inside them.
    """

    def __init__(self, *things: Any) -> None:
        self.epoch = 0  # which one comes next
        self.saved: tuple[int, Order] | None = None  # the epoch of a loaded position, and what draws its order
        self._part: _Part | None = None
        # A strong reference would keep the workers of a dropped loader.
        self._current: weakref.ref[EpochProgress] | None = None
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
        current.outer = _running(self.current)
        self.epoch += 1
        self._current = weakref.ref(current)

    def ends(self, current: EpochProgress) -> None:
        """Go on in the epoch in whose loop one has ended, or was left. Without one, that one stays the current."""
        around = _running(current.outer)
        if around is not None and self.current is current:
            self._current = weakref.ref(around)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_current": None}

    def listen(self, *things: Any) -> None:
        """Replace the samplers and datasets whose ``set_epoch`` is called."""
        self._listeners = _listeners(things)
        self._told = [_epochs_in(listener) for listener in self._listeners]

    def follow(self, whole: Any, part: Any) -> None:
        """Keep this rank's part of a dataset in the epoch of the whole one. Users may call ``set_epoch`` of either."""
        if part is not whole and all(hasattr(data, "set_epoch") and hasattr(data, "epoch") for data in (whole, part)):
            self.listen(*(whole if listener is part else listener for listener in self._listeners))
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
        for index, listener in enumerate(self._listeners):
            if self.epoch and _epochs_in(listener) == self._told[index]:  # the first epoch is what they were made for
                self._tell(index)
        if self._part is not None:
            self._part.push()

    def _tell(self, index: int) -> None:
        listener = self._listeners[index]
        listener.set_epoch(self.epoch)
        self._told[index] = _epochs_in(listener)


class _Part:
    """A rank's part of a dataset, and the whole one."""

    def __init__(self, whole: Any, part: Any) -> None:
        self._whole = whole
        self._part = part
        self._epoch = part.epoch  # in which the part was left

    def pull(self) -> None:
        """Set the epoch of the whole dataset to the part's, if the part's was set."""
        if self._part.epoch != self._epoch:
            self._whole.set_epoch(self._part.epoch)

    def push(self) -> None:
        """Set the epoch of the part to the whole dataset's."""
        self._part.set_epoch(self._whole.epoch)
        self._epoch = self._part.epoch


def _running(epoch: EpochProgress | None) -> EpochProgress | None:
    """Return an epoch, or the innermost around it, whose loop has not been left."""
    while epoch is not None and not epoch.is_running:
        epoch = epoch.outer
    return epoch


def _epochs_in(thing: Any) -> list[Any]:
    """Return the values by which a sampler or dataset says in which epoch it is."""
    inside = vars(thing) if hasattr(thing, "__dict__") else {}
    epochs = [value for name, value in inside.items() if "epoch" in name and isinstance(value, int)]
    return [getattr(thing, "epoch", None), *epochs]


def _listeners(things: tuple[Any, ...]) -> list[Any]:
    listeners: list[Any] = []
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
            listeners.append(thing)
        inner = vars(thing) if hasattr(thing, "__dict__") else {}
        queue += [inner[name] for name in ("batch_sampler", "sampler") if name in inner]
    return listeners
