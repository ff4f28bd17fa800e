"""Wrap a loader of torch so that it reads fast, can leave out the beginning of an epoch, and save its position."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.utils.data import BatchSampler, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.data.plan.samplers import SHUFFLING, BatchSamplerShard, skipping
from nb_accelerate.training.data.resuming.positions import SavedPosition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.utils.data import DataLoader
    from typing_extensions import Self


_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
)
_SETTINGS_OF_WORKERS = ("prefetch_factor", "persistent_workers", "in_order")


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments with which a loader was made, without its dataset, samplers and batch size."""
    settings = {name: getattr(loader, name) for name in _SETTINGS}
    if loader.num_workers:
        settings |= {name: getattr(loader, name) for name in _SETTINGS_OF_WORKERS if hasattr(loader, name)}
    if hasattr(loader, "snapshot_every_n_steps"):  # of torchdata
        settings["snapshot_every_n_steps"] = loader.snapshot_every_n_steps
    return settings


class TorchSource:
    """Reads a loader of torch, and saves positions as numbers of batches."""

    is_stateful = False  # whether a state is saved that is more than a number of batches

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    @property
    def sampler(self) -> Any:
        """The batch sampler of the loader, or its sampler if it makes no batches."""
        return self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler

    @property
    def reads_in_order(self) -> bool:
        """Whether rows cannot be left out without reading them."""
        return isinstance(self.loader.dataset, IterableDataset)

    def without(self, batches: int, reread: int = 0) -> Self:
        """Return a source with a new loader, whose sampler leaves out the first batches of each epoch.

        Both sources share the samplers inside. Where rows are read in order, nothing is left out. The first ``reread``
        are yielded all the same.
        """
        loader = self.loader
        changed: dict[str, Any] = {"batch_size": loader.batch_size}
        if self.reads_in_order:
            changed |= {} if loader.batch_size is None else {"drop_last": loader.drop_last}
        elif loader.batch_sampler is None:
            changed["sampler"] = skipping(loader.sampler, batches, reread=reread)
        else:
            changed = {"batch_sampler": skipping(loader.batch_sampler, batches, reread=reread)}
        later = copy.copy(self)
        later.loader = type(loader)(loader.dataset, **settings_of(loader), **changed)
        return later

    def open(self, epoch: int, *, resumed: bool) -> Iterator[Any]:  # noqa: ARG002 - for the subclass
        """Begin an epoch, and return its batches. Arguments are those of `Reader.read`."""
        loader = self.loader
        if not (epoch and loader.persistent_workers and loader._iterator is None):  # noqa: SLF001 - torch's
            return accelerated(iter(loader), loader)
        # Workers that stay are started in a later epoch because training is resumed. They are seeded without drawing
        # the number for it: an uninterrupted run drew it in its first epoch.
        own, loader.generator = loader.generator, torch.Generator()
        try:
            loader.generator.manual_seed((torch.initial_seed() + epoch) % 2**63)
            return iter(loader)
        finally:
            loader.generator = own

    def rows_of_last(self) -> int | None:
        """Return how many rows the last batch of an epoch has; None if only the batch itself can tell."""
        batches = self.sampler
        if self.reads_in_order or type(batches) not in (BatchSampler, BatchSamplerShard):
            return None
        try:
            rest = 0 if batches.drop_last else len(batches.sampler) % batches.batch_size
        except TypeError:  # a sampler without a length
            return None
        return rest or batches.batch_size

    def state(self) -> dict[str, Any] | None:
        """Return the state of torchdata's loader; None if a position is only a number of batches."""
        return None

    @property
    def is_restored(self) -> bool:
        """Whether the next epoch begins at a state that was restored, instead of at its beginning."""
        return False

    def restore(self, state: dict[str, Any]) -> None:
        """Begin the next epoch at a state that `state` returned; an empty one is the beginning."""

    def encode(self, position: SavedPosition, per_batch: int) -> dict[str, Any]:
        """Return a position in the form in which it is saved; ``per_batch`` is the reader's."""
        del per_batch
        state = {"epoch": position.epoch, "position": position.position}
        return state | ({"order": position.order} if position.order else {})

    def decode(self, state: Any, per_batch: int) -> SavedPosition:
        """Return the position in what `encode` returned."""
        del per_batch
        try:
            order = state.get("order", {})
            return SavedPosition(epoch=int(state["epoch"]), position=int(state["position"]), order=order)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"A loader cannot load this position ({type(error).__name__}: {error}). Pass what state_dict() of such "
                "a loader returned. A position of torchdata's loader needs use_stateful_dataloader=True."
            ) from error


def numbers_drawn(loader: DataLoader[Any], epoch: int) -> int:
    """Return how many random numbers torch draws when it begins to read a loader: a seed for workers that begin."""
    return 0 if loader.persistent_workers and epoch else 1


def accelerated(batches: Any, loader: DataLoader[Any]) -> Iterator[Any]:
    """Return what ``iter(loader)`` returned, with faster parts where there are some. Called before its first batch."""
    if type(batches) is not _SingleProcessDataLoaderIter:
        return batches  # type: ignore[no-any-return]
    sampler: Any = loader.batch_sampler
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if sampler is not None and type(dataset) is TensorDataset and loader.collate_fn is default_collate:
        kinds = [type(each) is torch.Tensor and each.layout is torch.strided for each in dataset.tensors]
        if all(kinds) and not any(each.is_nested for each in dataset.tensors):
            batches._dataset_fetcher = _TensorFetcher(loader.dataset)  # noqa: SLF001 - torch's
    is_stream = isinstance(loader.dataset, IterableDataset)
    if type(sampler) is BatchSampler and type(sampler.sampler) in SHUFFLING and not is_stream:
        # torch's sampler converts all row numbers to a Python list before the first batch.
        batches._sampler_iter = iter(BatchSamplerShard(sampler, even_batches=False))  # noqa: SLF001 - torch's
    return _read(batches)


def _read(batches: Any) -> Iterator[Any]:
    """Yield the batches of torch's iterator."""
    # Its `__next__` notes each for the profiler, also where none runs: 7 µs. It also warns of a dataset that is longer
    # than its length, which was asked for then.
    read = batches._next_data  # noqa: SLF001 - torch's
    was_asked = batches._IterableDataset_len_called is not None  # noqa: SLF001 - torch's
    while True:
        try:
            batch = next(batches) if was_asked or _profiler_enabled() else read()
        except StopIteration:
            return
        yield batch


class _TensorFetcher:
    """Takes the rows of a batch out of a `TensorDataset` at once; torch's fetcher takes and stacks them one by one."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def fetch(self, index: Sequence[int]) -> list[torch.Tensor]:
        """Return the next batch. Called by torch's iterator, with the numbers of its rows."""
        dataset, numbers = self._dataset, index
        while type(dataset) is Subset:
            indices = dataset.indices
            numbers = [indices[number] for number in numbers]
            dataset = dataset.dataset
        rows = torch.tensor(numbers, device="cpu")
        return [tensor[rows] for tensor in dataset.tensors]
