"""A loader over a stream that shards itself: each rank reads its own part, and nothing else.

No rank knows how long its part is, or those of the others. So before each step all ranks compare what they have::

    all have a full batch   ->  each hands out its own                     one number per rank travels
    otherwise               ->  what they have is dealt out to all         the rows of this step travel
    none has anything       ->  what is left is the incomplete last group

All ranks hand out equally many batches, and every row of the stream is handed out once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from nb_accelerate.comm import SingleCollectives
from nb_accelerate.data.counted import Counted, counted
from nb_accelerate.data.dealing import deal_rows, deal_whole, joined
from nb_accelerate.data.loader import DataLoaderShard
from nb_accelerate.data.reading import failing, next_of
from nb_accelerate.data.rows import slice_rows
from nb_accelerate.errors import ConfigError, DispatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.comm import Collectives

_FULL, _OTHER, _FAILED = range(3)


def shards_itself(dataset: Any, world_size: int) -> bool:
    """Whether a stream can give each rank shards of its own (``datasets.IterableDataset``, or one with its methods).

    Args:
        dataset: the user's.
        world_size: how many ranks there are.
    """
    return is_split(dataset) or 1 < world_size <= _shards(dataset)


def is_split(dataset: Any) -> bool:
    """Whether a dataset is one rank's part already, made by ``split_dataset_by_node``."""
    return getattr(dataset, "_distributed", None) is not None


def shard_of(dataset: Any, rank: int, world_size: int) -> Any:
    """Return a rank's shards of a stream that `shards_itself`.

    Raises:
        ConfigError: it was split between other ranks already.
    """
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
    """Whether a random generator in a ``datasets.IterableDataset`` was seeded by the operating system.

    Then its shards are in another order on each rank.
    """
    return any(_entropy(generator).bit_length() > 64 for generator in _generators(dataset))


def _entropy(generator: np.random.Generator) -> int:
    found = getattr(getattr(generator.bit_generator, "seed_seq", None), "entropy", 0)
    return found if isinstance(found, int) else 0


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


class DataLoaderNativeShard(DataLoaderShard):
    """A user's loader, prepared so that each rank reads its own shards of a stream.

    Args:
        dataset: this rank's shards.
        collectives: compares what ranks have.
        even_batches: give all ranks equally many batches; otherwise each ends with its own shards.
        drop_last_group: leave out the incomplete last group of all ranks. ``drop_last`` would leave out the last rows
            of each.
        drop_reads: batches of this rank's shards to read and leave out at the beginning of every epoch.
        **kwargs: those of `DataLoaderShard`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collectives: Collectives | None = None,
        even_batches: bool = True,
        drop_last_group: bool = False,
        drop_reads: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self._drop_last_group = drop_last_group
        self._collectives = collectives or SingleCollectives()
        self._even = even_batches
        self._drop_reads = drop_reads
        self._pool: list[Counted] = []  # what all ranks have read and not dealt out yet, the same on all
        self._before_pool: Any = None  # where reading was before there was anything in it
        self._since_pool = 0  # batches handed out since then
        self._arguments |= {
            "collectives": self._collectives,
            "even_batches": even_batches,
            "drop_last_group": drop_last_group,
            "drop_reads": drop_reads,
        }

    @property
    @override
    def even(self) -> bool:
        return self._even

    @even.setter
    def even(self, value: bool) -> None:
        self._even = value

    @override
    def extent(self) -> None:
        return None  # shards may differ in length

    @override
    def _source(self) -> Iterator[Any]:
        self._rest = None
        self._pool = []
        repeat, self._repeat = self._repeat, 0
        try:
            own = self._read()
        except Exception as error:
            own = failing(error)  # the others have to be told
        source = self._in_step(map(counted, own)) if self._even else self._apart(map(counted, own))
        for _ in range(self._dropped + repeat):
            next(source, None)
        return source

    @override
    def _leave_out(self, source: Iterator[Any]) -> None:
        for _ in range(self._drop_reads):
            next(source, None)

    @override
    def _reached(self) -> Any:
        return self._before_pool if self._pool else self._read_state()

    @property
    @override
    def _to_repeat(self) -> int:
        return self._since_pool if self._pool else 0

    def _apart(self, own: Iterator[Counted]) -> Iterator[Any]:
        return (batch.batch for batch in own if not self._drop_last_group or batch.rows == self.batch_size)

    def _in_step(self, own: Iterator[Counted]) -> Iterator[Any]:
        """Yield what this rank gets in each step. All ranks read together."""
        size = self.batch_size
        while True:
            if not self._pool:
                self._before_pool, self._since_pool = self._read_state(), 0
            batch, failure = next_of(own)
            full = batch is not None and (size is None or batch.rows == size)
            worst = self._worst(_FAILED if failure else _FULL if full and not self._pool else _OTHER)
            if worst == _FULL and batch is not None:
                yield batch.batch
                continue
            told = self._collectives.all_gather_object((batch, _described(failure)))
            for rank, (_, text) in enumerate(told):
                if failure is not None:
                    raise failure
                if text is not None:
                    raise DispatchError(f"Rank {rank}, which reads its own part of the data, failed: {text}")
            read = [other for other, _ in told if other is not None]
            self._pool += read
            for part in self._dealt(last=not read):
                self._since_pool += 1
                yield part
            if not read:
                return

    def _worst(self, word: int) -> int:
        number = torch.tensor(word, device=self._collectives.device)
        return int(self._collectives.all_reduce(number, "max").item())

    def _dealt(self, *, last: bool) -> Iterator[Any]:
        """Take full groups out of the pool, and an incomplete one at the end of the data; yield this rank's parts."""
        rank, ranks = self._collectives.rank, self._collectives.world_size
        size = self.batch_size
        if size is None:
            while len(self._pool) >= ranks:
                mine, self._pool = self._pool[rank], self._pool[ranks:]
                yield mine.batch
        elif self._pool:
            whole = joined(self._pool)
            rows, first = whole.rows or 0, 0
            while rows - first >= size * ranks:
                begin = first + rank * size
                first += size * ranks
                self._pool = [_part(whole, first, rows)] if first < rows else []
                yield _part(whole, begin, begin + size).batch
        if last and self._pool and not self._drop_last_group:
            deal = deal_whole if size is None else deal_rows
            parts, end = deal(self._pool, self._pool, ranks, even=True)
            self._pool = []
            yield parts[rank] if end is None else end.mark(parts[rank], rank)


def _part(whole: Counted, first: int, end: int) -> Counted:
    return Counted(slice_rows(whole.batch, slice(first, end), rows=whole.rows), end - first)


def _described(failure: Exception | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"
