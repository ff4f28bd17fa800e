"""Replace parts of the iterator of a torch loader by faster ones that yield the same batches.

Only where the loader reads in this process: workers make their own iterators. The same random numbers are drawn.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from nb_accelerate.data.iterable import MarkingShard
from nb_accelerate.data.samplers import SHUFFLING, BatchSamplerShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.data import DataLoader


def accelerated(batches: Any, loader: DataLoader[Any]) -> Iterator[Any]:
    """Return the iterator of a loader, with faster parts where there are some. Called before its first batch.

    Args:
        batches: what ``iter(loader)`` returned.
        loader: any.
    """
    sampler: Any = loader.batch_sampler
    if type(batches) is not _SingleProcessDataLoaderIter or type(sampler) is not BatchSampler:
        return batches  # type: ignore[no-any-return]
    if isinstance(loader.dataset, IterableDataset):
        # torch's sampler makes a new list of Nones for each batch. Its fetcher uses the length alone.
        batches._sampler_iter = itertools.repeat([None] * sampler.batch_size)  # noqa: SLF001 - torch's
        if type(loader.dataset) is MarkingShard and loader.dataset.rows_per_batch == sampler.batch_size:
            batches._dataset_fetcher = _PieceFetcher(  # noqa: SLF001 - torch's
                loader.dataset.pieces(), loader.collate_fn, drop_last=loader.drop_last
            )
    elif type(sampler.sampler) in SHUFFLING:
        # torch's sampler converts all row numbers to a Python list before the first batch.
        batches._sampler_iter = iter(BatchSamplerShard(sampler, even_batches=False))  # noqa: SLF001 - torch's
    return batches


class _PieceFetcher:
    """Makes a batch of each piece of a `MarkingShard` at once; torch's ``_IterableDatasetFetcher`` asks row by row.

    Args:
        pieces: the rows of this rank, group by group.
        collate: makes a batch of a list of rows.
        drop_last: leave out a piece with fewer rows than a batch.
    """

    def __init__(self, pieces: Iterator[Sequence[Any]], collate: Callable[[Any], Any], *, drop_last: bool) -> None:
        self._pieces = pieces
        self._collate = collate
        self._drop_last = drop_last

    def fetch(self, index: Sequence[None]) -> Any:
        """Return the next batch. Called by torch's iterator, with as many elements as a batch has rows.

        Raises:
            StopIteration: there is none.
        """
        rows = [*next(self._pieces)]
        if self._drop_last and len(rows) < len(index):
            raise StopIteration
        return self._collate(rows)
