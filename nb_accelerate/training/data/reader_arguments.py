"""Choose the arguments of a rebuilt loader: which sampler reads, from where on, and how ranks keep in step."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.data.dispatching.dispatcher import DispatchingReader
from nb_accelerate.training.data.loader import DataLoaderShard
from nb_accelerate.training.data.plan.plan import rows_per_rank
from nb_accelerate.training.data.plan.samplers import BatchSamplerShard, SamplerShard, SeedableRandomSampler
from nb_accelerate.training.data.plan.shuffling import RNGSync, SharedStart, sampler_sync
from nb_accelerate.training.data.plan.skipping import split_skip
from nb_accelerate.training.data.reading.iterable import MarkingCollate, MarkingShard
from nb_accelerate.training.data.reading.reader import Reader
from nb_accelerate.training.data.reading.streams import StreamReader, shard_of
from nb_accelerate.training.process.rng import RNGType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from torch.utils.data import DataLoader

    from nb_accelerate.base.config.loader import DataLoaderConfiguration
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.data.plan.samplers import MakeSync

_COPIED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # they may be given a generator


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
        """Return the arguments for a map-style dataset."""
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
        parts: dict[str, Any] = {"dataset": loader.dataset, "on_start": self._on_start(self._global_sync(), in_step)}
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
        """Return the arguments for an iterable dataset."""
        loader, batched = self.loader, self.loader.batch_size is not None
        parts: dict[str, Any] = {
            "dataset": loader.dataset,
            "batch_size": loader.batch_size,
            "on_start": self._on_start(self._global_sync(getattr(loader.dataset, "generator", None))),
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
        """Return samplers that may be changed without changing those of the user's loader.

        Samplers of other kinds stay the user's own objects, who may hold on to them and call their ``set_epoch``.
        """
        wanted = self._seedable(inner) if self.config.use_seedable_sampler else None
        if self.ranks == 1 and wanted is None and not self.shares and not hasattr(inner, "set_epoch"):
            return outer
        if not batches:
            return wanted if wanted is not None else _copied(outer)
        if type(outer) is not BatchSampler:
            return outer  # its sampler may be bound up with it in ways we do not know
        own = wanted if wanted is not None else _copied(inner)
        made: Any = BatchSampler(own, outer.batch_size, outer.drop_last)
        if hasattr(own, "set_epoch"):
            made.set_epoch = own.set_epoch  # code that was written for a DistributedSampler asks for it in many places
        return made

    def _seedable(self, sampler: Any) -> SeedableRandomSampler | None:
        if type(sampler) is not RandomSampler:
            return None
        seed = self.config.data_seed
        if seed is None:
            mine = torch.tensor(torch.initial_seed() % 2**63)
            seed = int(self.collectives.broadcast(mine, 0).item())
        return SeedableRandomSampler(
            sampler.data_source,
            sampler.replacement,
            sampler._num_samples,  # noqa: SLF001 - None, where num_samples would be today's length
            data_seed=seed,
        )

    def _make_sync(self) -> MakeSync | None:
        if RNGType.GENERATOR not in self.rng_types:
            return None
        return partial(_order_sync, broadcast=partial(self.collectives.broadcast, source=0))

    def _global_sync(self, generator: torch.Generator | None = None) -> Callable[[], None] | None:
        types = [kind for kind in self.rng_types if kind is not RNGType.GENERATOR or generator is not None]
        if self.collectives.world_size == 1 or not types:
            return None
        if RNGType.GENERATOR not in types:
            generator = None
        return RNGSync(types, partial(self.collectives.broadcast, source=0), generator)

    def _on_start(self, *before: Callable[[], None] | None) -> Callable[[], None] | None:
        """Return what is called before each epoch."""
        if self.shares:
            return SharedStart(self.collectives, *before)
        return next((sync for sync in before if sync is not None), None)

    def _total(self, batch_size: int | None) -> int | None:
        if batch_size is None or self.config.split_batches:
            return batch_size
        return batch_size * self.collectives.world_size


def _order_sync(outer: Any, inner: Any, *, broadcast: Callable[[Tensor], Tensor]) -> Callable[[], None] | None:
    if isinstance(inner, SeedableRandomSampler):
        return None  # its seed is in step
    return sampler_sync(inner, broadcast) or sampler_sync(outer, broadcast)


def _copied(sampler: Any) -> Any:
    return copy.copy(sampler) if type(sampler) in _COPIED else sampler
