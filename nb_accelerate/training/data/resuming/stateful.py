"""Loaders that save the state of samplers and datasets with their position, by means of torchdata.

Such a loader saves what torchdata's own would save after the batch that was handed out last, although it has read
further; see `training.data.resuming.positions`.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from nb_accelerate.errors import MissingDependencyError
from nb_accelerate.training.data.reading.source import TorchSource
from nb_accelerate.training.data.resuming import positions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.training.data.resuming.positions import SavedPosition


def is_stateful(loader: object) -> bool:
    """Return whether a loader is torchdata's, without importing torchdata."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(loader, module.StatefulDataLoader)


def loader_class(*, stateful: bool) -> type[DataLoader[Any]]:
    """Return the class of torch's loader, or of torchdata's."""
    if not stateful:
        return DataLoader
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        raise MissingDependencyError(
            "torchdata", needed_for="DataLoaderConfiguration(use_stateful_dataloader=True)"
        ) from None
    return StatefulDataLoader  # type: ignore[no-any-return]  # torchdata has no types


@functools.cache
def stateful_class(kind: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    """Return a subclass of a class of prepared loaders and of torchdata's loader, for ``isinstance``."""
    name = f"Stateful{kind.__name__}"
    return type(name, (kind, loader_class(stateful=True)), {"__doc__": kind.__doc__, "__module__": kind.__module__})


class StatefulSource(TorchSource):
    """Reads a loader of torchdata, and saves the states of samplers and datasets with the number of batches."""

    is_stateful = True
    loader: Any
    _iterator: Any = None  # of torchdata, for the epoch that this source has opened; the loader keeps the latest

    @override
    def open(self, epoch: int, *, resumed: bool) -> Iterator[Any]:
        batches = self._opened(epoch, resumed=resumed)
        self._iterator = self.loader._iterator  # noqa: SLF001 - torchdata's
        return batches

    def _opened(self, epoch: int, *, resumed: bool) -> Iterator[Any]:
        if not self.is_restored:
            return super().open(epoch, resumed=resumed)
        loader, over = self.loader, positions.is_over(self.loader.next_iter_state)
        if over and resumed:  # this rank's part is over; those of others are not
            loader.next_iter_state = None
            return iter(())
        if over and not loader.persistent_workers:
            # torchdata begins the epoch that is over, for the sake of its states, and then the next one; an
            # uninterrupted run draws a number for the next one only.
            with torch.random.fork_rng(devices=()):
                loader._get_iterator()  # noqa: SLF001 - torchdata has no other way to
        return super().open(epoch, resumed=resumed)

    @override
    def state(self) -> dict[str, Any]:
        loader, latest = self.loader, self.loader._iterator  # noqa: SLF001 - torchdata's
        loader._iterator = latest if self._iterator is None else self._iterator  # noqa: SLF001 - whose state it saves
        try:
            # Without an iterator, torchdata would begin an epoch to have a state.
            return loader.state_dict() if loader._iterator is not None else {}  # noqa: SLF001
        finally:
            loader._iterator = latest  # noqa: SLF001 - torchdata's

    @property
    @override
    def is_restored(self) -> bool:
        return self.loader.next_iter_state is not None

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self.loader.next_iter_state = None  # torchdata keeps one that was loaded before if there is nothing to restore
        self.loader.load_state_dict(state)

    @override
    def encode(self, position: SavedPosition, per_batch: int) -> dict[str, Any]:
        return positions.encode(position, per_batch=per_batch)

    @override
    def decode(self, state: Any, per_batch: int) -> SavedPosition:
        return positions.decode(state, per_batch=per_batch, workers=self.loader.num_workers)


def source_of(loader: DataLoader[Any]) -> TorchSource:
    return StatefulSource(loader) if is_stateful(loader) else TorchSource(loader)
