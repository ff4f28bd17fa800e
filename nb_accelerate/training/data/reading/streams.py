"""Read a stream that can be sharded: each rank reads its own shards, and nothing else.

No rank knows how long its part is, or those of the others. So before each step all ranks compare what they have::

    all have a full batch   ->  each hands out its own                     one number per rank travels
    otherwise               ->  what they have is divided among all        the rows of this step travel
    none has anything       ->  what is left is the incomplete last group

All ranks hand out equally many batches, and every row of the stream is handed out once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from nb_accelerate.errors import ConfigError, DispatchError
from nb_accelerate.training.data.dispatching.batch_parts import (
    CountedBatch,
    count_batch,
    next_or_error,
    num_rows,
    parts_of_last_group,
    raise_on_next,
    take_from,
)
from nb_accelerate.training.data.reading.iterable import LastBatch
from nb_accelerate.training.data.reading.reader import CollectiveReader, ReadState, skip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.training.data.reading.source import TorchSource

_FULL, _OTHER, _FAILED = range(3)  # codes for what a rank has for the next step, from good to bad


def shards_itself(dataset: Any, world_size: int) -> bool:
    """Return whether a stream can give each rank shards of its own: ``datasets.IterableDataset``, or the like."""
    return is_split(dataset) or 1 < world_size <= _shards(dataset)


def is_split(dataset: Any) -> bool:
    """Return whether a dataset is one rank's part already, made by ``split_dataset_by_node``."""
    return getattr(dataset, "_distributed", None) is not None


def shard_of(dataset: Any, rank: int, world_size: int) -> Any:
    """Return a rank's shards of a stream that `shards_itself`; a `ConfigError` if it was split between other ranks."""
    split = getattr(dataset, "_distributed", None)
    if split is None:
        return dataset.shard(num_shards=world_size, index=rank)
    if (split.rank, split.world_size) == (rank, world_size):
        return dataset  # by split_dataset_by_node
    raise ConfigError(
        f"The dataset was split for rank {split.rank} of {split.world_size} (split_dataset_by_node), and this is rank "
        f"{rank} of {world_size}. Leave split_dataset_by_node out: prepare shares the dataset out."
    )


def _shards(dataset: Any) -> int:
    if not callable(getattr(dataset, "shard", None)):
        return 0
    number = getattr(dataset, "num_shards", None)
    number = getattr(dataset, "n_shards", None) if number is None else number  # its name before datasets 3
    return number if isinstance(number, int) else 0


def shuffled_without_seed(dataset: Any) -> bool:
    """Return whether a random generator in a ``datasets.IterableDataset`` was seeded by the operating system."""
    seeds = (getattr(generator.bit_generator, "seed_seq", None) for generator in _generators(dataset))
    entropies = (getattr(seed, "entropy", 0) for seed in seeds)
    return any(isinstance(entropy, int) and entropy.bit_length() > 64 for entropy in entropies)


def _generators(thing: Any) -> Iterator[np.random.Generator]:
    if isinstance(thing, np.random.Generator):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for item in thing[:1] if thing and not _of_datasets(thing[0]) else thing:
            yield from _generators(item)
    elif _of_datasets(thing):
        for value in vars(thing).values():
            yield from _generators(value)


def _of_datasets(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] == "datasets" and hasattr(thing, "__dict__")


class StreamReader(CollectiveReader):
    """Reads this rank's shards of a stream, in lockstep with the other ranks; without ``even_batches``, independently.

    ``drop_last_group`` leaves out the incomplete last group of all ranks; ``drop_last`` would leave out rows of each.
    """

    def __init__(self, source: TorchSource, *, drop_last_group: bool = False, **kwargs: Any) -> None:
        super().__init__(source, **kwargs)
        self._drop_last_group = drop_last_group
        # Batches of all ranks that were gathered and not handed out; the same on all ranks.
        self._pool: list[CountedBatch] = []
        self._state_before_pool = ReadState()  # the state of reading when the pool was last empty
        self._yielded_since = 0  # batches handed out since then

    @override
    def read(self, epoch: int, *, resumed: bool, repeat: int = 0) -> Iterator[Any]:
        self._pool = []
        dropped = 0 if resumed and self.source.is_restored else self.dropped
        try:
            opened = self.source.open(epoch, resumed=resumed)
        except Exception as error:
            opened = raise_on_next(error)  # the others have to be told
        counted = map(count_batch, opened)
        if self.even_batches:
            batches = self._in_lockstep(counted)
        else:  # this rank's own batches, without communication
            size = self.source.loader.batch_size
            batches = (batch.batch for batch in counted if not self._drop_last_group or batch.rows == size)
        skip(batches, dropped + repeat)
        return batches

    @override
    def read_state(self) -> ReadState:
        return replace(self._state_before_pool, repeat=self._yielded_since) if self._pool else super().read_state()

    def _in_lockstep(self, batches: Iterator[CountedBatch]) -> Iterator[Any]:
        """Yield this rank's batch of each step. All ranks iterate it together."""
        size = self.source.loader.batch_size
        while True:
            if not self._pool:
                self._state_before_pool, self._yielded_since = super().read_state(), 0
            batch, failure = next_or_error(batches)
            full = batch is not None and (size is None or batch.rows == size)
            code = _FAILED if failure else _FULL if full and not self._pool else _OTHER
            worst = int(self.collectives.all_reduce(torch.tensor(code, device=self.collectives.device), "max").item())
            if worst == _FULL and batch is not None:
                yield batch.batch
                continue
            text = None if failure is None else f"{type(failure).__name__}: {failure}"
            of_ranks = self.collectives.all_gather_object((batch, text))
            for rank, (_, text) in enumerate(of_ranks):
                if failure is not None:
                    raise failure
                if text is not None:
                    raise DispatchError(f"Rank {rank}, which reads its own part of the data, failed: {text}")
            read = [other for other, _ in of_ranks if other is not None]
            self._pool += read
            for part in self._take_groups(last=not read):
                self._yielded_since += 1
                yield part
            if not read:
                return

    def _take_groups(self, *, last: bool) -> Iterator[Any]:
        """Remove full groups from the pool, and an incomplete one at the end of the data; yield this rank's parts."""
        rank, ranks = self.collectives.rank, self.collectives.world_size
        size = self.source.loader.batch_size
        take = None if size is None or not self._pool else take_from(self._pool)
        if size is None or take is None:
            while len(self._pool) >= ranks:
                mine, self._pool = self._pool[rank], self._pool[ranks:]
                yield mine.batch
        else:
            rows, first = num_rows(self._pool), 0
            while rows - first >= size * ranks:
                begin = first + rank * size
                first += size * ranks
                rest = [CountedBatch(take(slice(first, rows)), rows - first, self._pool[0].of_columns)]
                self._pool = rest if first < rows else []
                yield take(slice(begin, begin + size))
        if last and self._pool and not self._drop_last_group:
            parts, end = parts_of_last_group(self._pool, self._pool, ranks, even=True, by_row=size is not None)
            self._pool = []
            yield parts[rank] if end is None else LastBatch(parts[rank], end[rank])
