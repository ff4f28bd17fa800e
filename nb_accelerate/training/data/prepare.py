"""Rebuild a user's loader so that it yields one rank's part of the data.

torch does not let the sampler of a loader be changed, so a new loader is made, with all other settings as they were.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from nb_accelerate.base.config.checks import check_whole
from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.comm import SingleCollectives
from nb_accelerate.training.data.adapter import DataLoaderAdapter
from nb_accelerate.training.data.dispatching.batch_parts import CountingCollate
from nb_accelerate.training.data.dispatching.dispatcher import DataLoaderDispatcher, DispatchingReader
from nb_accelerate.training.data.loader import DataLoaderShard
from nb_accelerate.training.data.reader_arguments import ReaderArguments
from nb_accelerate.training.data.reading.reader import Reader
from nb_accelerate.training.data.reading.source import settings_of
from nb_accelerate.training.data.reading.streams import StreamReader, is_split, shards_itself, shuffled_without_seed
from nb_accelerate.training.data.resuming.stateful import is_stateful
from nb_accelerate.training.process.rng import RNGType

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.data.dispatching.dispatcher import SliceFunction
    from nb_accelerate.training.data.tracker import LoaderView

_KNOWN_ITERATION = {DataLoader.__iter__, DataLoaderAdapter.__iter__, DataLoaderShard.__iter__}


def prepare_data_loader(
    loader: DataLoader[Any],
    *,
    collectives: Collectives,
    config: DataLoaderConfiguration | None = None,
    device: torch.device | None = None,
    gradient_state: LoaderView | None = None,
    rng_types: Sequence[RNGType] = (RNGType.GENERATOR,),
    slice_fn: SliceFunction | None = None,
) -> DataLoaderShard:
    """Return a loader that yields this rank's part of another one.

    In one process it yields what the other would, row for row and with the same random numbers.

    Args:
        loader: the user's. Its samplers are copied before they are changed, where that is possible.
        collectives: those of the ranks; also used to synchronise random states.
        device: where batches go; None leaves them where they are.
        gradient_state: has the tracker that is told when epochs begin and end.
        rng_types: which random states are set to those of rank 0 before each epoch.
        slice_fn: splits a batch, where rank 0 reads for all: called with the batch, a slice,
            ``process_index`` and ``num_processes``.

    Raises:
        ConfigError: the loader is sharded already, or cannot be sharded as ``config`` says.
        MissingDependencyError: a stateful loader is asked for, and torchdata is not installed.
    """
    if isinstance(loader, DataLoaderDispatcher) or (isinstance(loader, DataLoaderShard) and loader.prepared):
        return loader
    _refuse_own_iteration(loader)
    return _rebuilt(
        loader,
        collectives,
        config or DataLoaderConfiguration(),
        rng_types,
        slice_fn=slice_fn,
        device=device,
        gradient_state=gradient_state,
        prepared=True,
    )


def _refuse_own_iteration(loader: DataLoader[Any]) -> None:
    if type(loader).__iter__ not in _KNOWN_ITERATION and not is_stateful(loader):
        raise ConfigError(
            f"{type(loader).__name__} has an __iter__ of its own, which would be lost: prepare makes a new "
            "DataLoader. Prepare a plain torch.utils.data.DataLoader, or leave yours out and move its batches to "
            "accelerator.device."
        )


def _rebuilt(
    loader: DataLoader[Any],
    collectives: Collectives,
    config: DataLoaderConfiguration,
    rng_types: Sequence[RNGType],
    *,
    slice_fn: SliceFunction | None = None,
    device: torch.device | None = None,
    **settings: Any,
) -> DataLoaderShard:
    """Return a new loader with the user's settings, and with a reader and samplers for this rank."""
    kind = _reader_class(loader.dataset, collectives, config)
    chosen = ReaderArguments(loader, collectives, config, rng_types, kind)
    parts = chosen.iterable() if isinstance(loader.dataset, IterableDataset) else chosen.mapped()
    reader = chosen.reader
    if kind is DispatchingReader:
        reader |= {"split_batches": config.split_batches, "slice_fn": slice_fn, "bring_back": device is None}
    if kind is not Reader:
        reader |= {"collectives": collectives, "even_batches": config.even_batches}
        if parts.get("batch_size", loader.batch_sampler) is not None:
            cut = kind is DispatchingReader and config.split_batches and slice_fn is None
            parts["collate_fn"] = CountingCollate(loader.collate_fn, collectives.world_size if cut else None)
    loader_class = DataLoaderDispatcher if kind is DispatchingReader else DataLoaderShard
    made = loader_class(
        rng_types=rng_types,
        non_blocking=config.non_blocking,
        rows=_length(loader.dataset),
        use_stateful_dataloader=config.use_stateful_dataloader or is_stateful(loader),
        reader=partial(kind, **reader),
        device=device,
        **{**settings_of(loader), **parts, **settings},
    )
    made.epochs.follow(loader.dataset, made.dataset)
    if isinstance(loader, DataLoaderShard) and loader.iteration:
        made.set_epoch(loader.iteration)
    return made.skipping(chosen.later) if chosen.later else made


def _reader_class(dataset: Any, collectives: Collectives, config: DataLoaderConfiguration) -> type[Reader]:
    """Choose who reads a dataset: every rank, rank 0 for all, or every rank its own part of a stream."""
    world_size = collectives.world_size
    if world_size == collectives.num_sharing == 1:
        return Reader
    if config.dispatch_batches:
        return DispatchingReader
    if not isinstance(dataset, IterableDataset):
        return Reader
    sharding = shards_itself(dataset, world_size)
    if sharding and not shuffled_without_seed(dataset):
        return StreamReader
    # One that shuffles, or that is read from a socket, would yield other rows on each rank.
    if sharding and (config.dispatch_batches is False or is_split(dataset)):
        raise ConfigError(
            "The dataset is shuffled without a seed, so each rank would take its shards out of another order. Write "
            "dataset.shuffle(seed=42), or leave out dispatch_batches=False and split_dataset_by_node: then rank 0 "
            "reads for all."
        )
    if config.dispatch_batches is None:
        return DispatchingReader
    return Reader


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoaderShard:
    """Return a loader that leaves out the first batches of every epoch.

    Use it for the epoch in which training is resumed. Rows of a dataset that is read by number are left out without
    being read; an iterable dataset has to be read to be skipped.

    Args:
        dataloader: prepared or not.
        num_batches: how many to leave out; of a prepared loader, batches of each process.

    Raises:
        ConfigError: ``num_batches`` is not a whole number, or negative.
    """
    check_whole("num_batches", num_batches, at_least=0)
    if not isinstance(dataloader, DataLoaderShard):
        _refuse_own_iteration(dataloader)
        dataloader = _rebuilt(dataloader, SingleCollectives(), DataLoaderConfiguration(), (RNGType.GENERATOR,))
    return dataloader.skipping(num_batches)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # a dataset's own: a stream need not know its length, and says so as it likes
        return None
