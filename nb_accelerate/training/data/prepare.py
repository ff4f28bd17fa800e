"""Rebuild a user's loader so that it yields one rank's part of the data.

torch does not let the sampler of a loader be changed, so a new loader is made, with all other settings as they were.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nb_accelerate.base.config.checks import check_whole
from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.errors import CollectiveMismatchError, ConfigError
from nb_accelerate.training.comm import SingleCollectives
from nb_accelerate.training.data.adapter import DataLoaderAdapter
from nb_accelerate.training.data.dispatching.batch_parts import CountingCollate
from nb_accelerate.training.data.dispatching.dispatcher import DataLoaderDispatcher, DispatchingReader
from nb_accelerate.training.data.loader import DataLoaderShard
from nb_accelerate.training.data.plan.plan import rows_per_rank
from nb_accelerate.training.data.plan.samplers import BatchSamplerShard, SamplerShard, SeedableRandomSampler, split_skip
from nb_accelerate.training.data.plan.shuffling import EpochStart, sampler_sync
from nb_accelerate.training.data.reading.iterable import MarkingCollate, MarkingShard
from nb_accelerate.training.data.reading.reader import Reader
from nb_accelerate.training.data.reading.source import settings_of
from nb_accelerate.training.data.reading.streams import (
    StreamReader,
    is_split,
    shard_of,
    shards_itself,
    shuffled_without_seed,
)
from nb_accelerate.training.data.resuming.stateful import is_stateful
from nb_accelerate.training.process.rng import RNGType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.data.dispatching.dispatcher import SliceFunction
    from nb_accelerate.training.data.loops import LoaderView
    from nb_accelerate.training.data.plan.shuffling import SamplerSync


_COPIED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # they may be given a generator

_KNOWN_ITERATION = {DataLoader.__iter__, DataLoaderAdapter.__iter__, DataLoaderShard.__iter__}


class ReaderArguments:
    """Choose the arguments of the new loader that differ from those of the user's.

    `reader` has those of its reader, and `later` the steps to leave out because the user's leaves out first batches.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        collectives: Collectives,
        config: DataLoaderConfiguration,
        rng_types: Sequence[RNGType],
        kind: type[Reader],
    ) -> None:
        self.loader = loader
        self.kind = kind
        # Where rank 0 reads for all, it reads as if it were alone.
        self.ranks = 1 if kind is DispatchingReader else collectives.world_size
        self.rank = 0 if kind is DispatchingReader else collectives.rank
        self.shares = collectives.num_sharing > 1
        self.collectives = collectives
        self.config = config
        self.rng_types = rng_types
        self.reader: dict[str, Any] = {}
        self.later = 0

    def _leave_out(self, batches: int) -> None:
        """Leave out batches that the user's loader leaves out, which has to be whole steps of the new one."""
        per_step = 1 if self.config.split_batches else self.collectives.world_size
        if batches % per_step:
            raise ConfigError(
                f"The loader leaves out its first {batches} batches, which are no whole steps of {per_step} processes. "
                "Prepare it first, then leave out batches of each process: "
                f"accelerator.skip_first_batches(accelerator.prepare(loader), {batches // per_step})."
            )
        self.later = batches // per_step

    def mapped(self) -> dict[str, Any]:
        loader = self.loader
        # A loader with batch_size=None has no batch sampler; its sampler may be one (datasets that fetch many rows
        # at once are read that way), or may yield items that are batches by themselves.
        batched = loader.batch_sampler is not None
        outer: Any = loader.batch_sampler if batched else loader.sampler
        if isinstance(loader, DataLoaderShard):  # not prepared: made to leave out the beginning
            outer, skipped = split_skip(outer)
            self._leave_out(skipped + loader.left_out_by_reading)
        batches = batched or isinstance(outer, BatchSampler)
        inner = getattr(outer, "sampler", None) if batches else outer
        if (self.collectives.world_size > 1 or self.shares) and isinstance(
            outer if inner is None else inner, DistributedSampler
        ):
            raise ConfigError(
                "The loader has a DistributedSampler, so each rank would get a part of a part of the data. Leave "
                "the sampler out (write shuffle=True instead): prepare shares out the data."
            )
        outer = self._own(outer, inner, batches=batches)
        # Where no sampler is cut into parts, ranks that share all rows still have to draw them in one order.
        order = self._make_sync() if self.kind is Reader and self.ranks == 1 else None
        in_step = order(outer, inner) if order is not None and self.shares else None
        parts: dict[str, Any] = {"dataset": loader.dataset, "on_start": self._on_start(in_step=in_step)}
        if self.ranks > 1:
            even, sync = self.config.even_batches, self._make_sync()
            if batches:
                split = self.config.split_batches
                outer = BatchSamplerShard(outer, self.ranks, self.rank, split, even, make_sync=sync)
            else:
                outer = SamplerShard(outer, self.ranks, self.rank, even_batches=even, make_sync=sync)
            self.reader["shard"] = outer
        if batched:
            parts["batch_sampler"] = outer
        else:
            parts |= {"sampler": outer, "batch_size": None}
        parts["total_batch_size"] = self._total(getattr(outer, "batch_size", None))
        return parts

    def iterable(self) -> dict[str, Any]:
        loader, batched = self.loader, self.loader.batch_size is not None
        parts: dict[str, Any] = {
            "dataset": loader.dataset,
            "batch_size": loader.batch_size,
            "on_start": self._on_start(getattr(loader.dataset, "generator", None)),
            "total_batch_size": self._total(loader.batch_size),
        }
        if batched:
            parts["drop_last"] = loader.drop_last
        if isinstance(loader, DataLoaderShard):
            self._leave_out(loader.left_out_by_reading)
        if self.ranks == 1:
            return parts
        split = self.config.split_batches and batched
        size = loader.batch_size or 1
        if batched:
            parts["batch_size"] = rows_per_rank(size, self.ranks, split_batches=split)
        if self.kind is StreamReader:
            parts["dataset"] = shard_of(loader.dataset, self.rank, self.ranks)
            self.reader["drop_last_group"] = parts.pop("drop_last", False)
            return parts
        parts["dataset"] = shard = MarkingShard(
            cast("Iterable[Any]", loader.dataset),
            size,
            bool(batched and loader.drop_last),
            self.ranks,
            self.rank,
            split,
            even_batches=self.config.even_batches,
        )
        self.reader["shard"] = shard
        parts["collate_fn"] = MarkingCollate(loader.collate_fn, batched=batched)
        return parts

    def _own(self, outer: Any, inner: Any, *, batches: bool) -> Any:
        """Return samplers that may be changed without changing those of the user's loader."""
        # Samplers of other kinds stay the user's own objects, who may hold on to them and call their `set_epoch`.
        wanted = self._seedable(inner) if self.config.use_seedable_sampler else None
        if self.ranks == 1 and wanted is None and not self.shares and not hasattr(inner, "set_epoch"):
            return outer
        if not batches:
            return wanted if wanted is not None else _copied(outer)
        if type(outer) is not BatchSampler:
            return outer  # its sampler may be bound up with it in ways we do not know
        sampler = wanted if wanted is not None else _copied(inner)
        made: Any = BatchSampler(sampler, outer.batch_size, outer.drop_last)
        if hasattr(sampler, "set_epoch"):
            # Code that was written for a DistributedSampler asks for it in many places.
            made.set_epoch = sampler.set_epoch
        return made

    def _seedable(self, sampler: Any) -> SeedableRandomSampler | None:
        if type(sampler) is not RandomSampler:
            return None
        seed = self.config.data_seed
        if seed is None:
            mine = torch.tensor(torch.initial_seed() % 2**63, device="cpu")
            seed = int(self.collectives.broadcast(mine, 0).item())
        return SeedableRandomSampler(
            sampler.data_source,
            sampler.replacement,
            sampler._num_samples,  # noqa: SLF001 - None, where num_samples would be today's length
            data_seed=seed,
        )

    def _make_sync(self) -> Callable[[Any, Any], SamplerSync | None] | None:
        if RNGType.GENERATOR not in self.rng_types:
            return None
        broadcast = partial(self.collectives.broadcast, source=0)

        def sync(outer: Any, inner: Any) -> SamplerSync | None:
            if isinstance(inner, SeedableRandomSampler):
                return None  # its seed is in step
            return sampler_sync(inner, broadcast) or sampler_sync(outer, broadcast)

        return sync

    def _on_start(
        self, generator: torch.Generator | None = None, in_step: SamplerSync | None = None
    ) -> EpochStart | None:
        """Return what is called before each epoch."""
        types = [kind for kind in self.rng_types if kind is not RNGType.GENERATOR or generator is not None]
        types = types if self.collectives.world_size > 1 else []
        if not types and not self.shares:
            return None
        return EpochStart(types, self.collectives, generator if RNGType.GENERATOR in types else None, in_step)

    def _total(self, batch_size: int | None) -> int | None:
        if batch_size is None or self.config.split_batches:
            return batch_size
        return batch_size * self.collectives.world_size


def _copied(sampler: Any) -> Any:
    return copy.copy(sampler) if type(sampler) in _COPIED else sampler


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
        gradient_state: has the `RunningLoops` that are told when epochs begin and end.
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
    if isinstance(dataset, IterDataPipe):  # torch's iterator of one is a collective, which would meet those of ours
        raise ConfigError(
            f"{type(dataset).__name__} is a datapipe, which torch shares out between ranks by itself, and no longer "
            "develops. Write a class of your own of IterableDataset around it."
        )
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


def check_lengths(collectives: Collectives, loaders: Sequence[DataLoaderShard]) -> None:
    """Compare the lengths of loaders between ranks, before ranks wait for batches that others do not have.

    All ranks call it together, with equally many loaders. Loaders that may end apart (``even_batches=False``) or do
    not know their length are not compared.
    """
    if collectives.world_size == 1 or not loaders:
        return
    of_ranks = collectives.all_gather_object([loader.extent() for loader in loaders])
    for number, extents in enumerate(zip(*of_ranks, strict=False), start=1):
        first = extents[0]
        rank, other = next(((rank, other) for rank, other in enumerate(extents) if other != first), (0, None))
        if first is not None and other is not None and None not in extents:
            raise CollectiveMismatchError(
                f"prepare was given loaders of different lengths: number {number} has {first[0]} rows on rank 0, so "
                f"{first[1]} batches for each rank, and {other[0]} rows on rank {rank}, so {other[1]} batches. Ranks "
                "would wait for each other for ever. Give all ranks the same dataset; prepare shares it out. "
                "If each is to have data of its own, write DataLoaderConfiguration(even_batches=False) and loop inside "
                "of accelerator.join_uneven_inputs([model])."
            )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # a dataset's own: a stream need not know its length, and says so as it likes
        return None
