"""Replace parts of the iterator of a torch loader by faster ones that yield the same batches.

Only where the loader reads in this process: workers make their own iterators. The same random numbers are drawn.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.utils.data import BatchSampler, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from nb_accelerate.training.data.iterable import MarkingShard
from nb_accelerate.training.data.samplers import SHUFFLING, BatchSamplerShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.data import DataLoader


def accelerated(batches: Any, loader: DataLoader[Any]) -> Iterator[Any]:
    """Return the iterator of a loader, with faster parts where there are some. Called before its first batch.

    Args:
        batches: what ``iter(loader)`` returned.
    """
    if type(batches) is not _SingleProcessDataLoaderIter:
        return batches  # type: ignore[no-any-return]
    sampler: Any = loader.batch_sampler
    if sampler is not None and _holds_tensors(loader.dataset) and _collates_as_torch(loader):
        batches._dataset_fetcher = _TensorFetcher(loader.dataset, batches._dataset_fetcher)  # noqa: SLF001 - torch's
    if type(sampler) is BatchSampler:
        _draw_faster(batches, loader, sampler)
    return _read(batches)


def _draw_faster(batches: Any, loader: DataLoader[Any], sampler: BatchSampler) -> None:
    """Replace how an iterator draws the numbers of rows."""
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


def _read(batches: Any) -> Iterator[Any]:
    """Yield the batches of torch's iterator.

    Its `__next__` notes each for the profiler, also where none runs: 7 µs. It also warns of a dataset that is longer
    than its length, which was asked for then.
    """
    read = batches._next_data  # noqa: SLF001 - torch's
    was_asked = batches._IterableDataset_len_called is not None  # noqa: SLF001 - torch's
    while True:
        try:
            batch = next(batches) if was_asked or _profiler_enabled() else read()
        except StopIteration:
            return
        yield batch


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


class _TensorFetcher:
    """Takes the rows of a batch out of a `TensorDataset` at once; torch's fetcher takes and stacks them one by one.

    Args:
        dataset: a `TensorDataset`, or a `Subset` of one.
        one_by_one: torch's fetcher, for tensors and row numbers of which copies at once could differ.
    """

    def __init__(self, dataset: Any, one_by_one: Any) -> None:
        self._dataset = dataset
        self._one_by_one = one_by_one

    def fetch(self, index: Sequence[Any]) -> Any:
        """Return the next batch. Called by torch's iterator, with the numbers of its rows."""
        dataset, numbers = self._dataset, index
        while type(dataset) is Subset:
            indices = dataset.indices
            numbers = [indices[number] for number in numbers]
            dataset = dataset.dataset
        if not all(map(_is_plain, dataset.tensors)) or set(map(type, numbers)) != {int}:
            return self._one_by_one.fetch(index)
        rows = torch.tensor(numbers, device="cpu")
        return [tensor[rows] for tensor in dataset.tensors]


def _holds_tensors(dataset: Any) -> bool:
    """Return whether a dataset is torch's `TensorDataset`, or a part of one, and no subclass."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset


def _collates_as_torch(loader: DataLoader[Any]) -> bool:
    """Return whether a loader makes batches by torch's `default_collate`, to which nobody has added types."""
    return loader.collate_fn is default_collate and all(
        function.__module__ == torch_collate.__name__ for function in torch_collate.default_collate_fn_map.values()
    )


def _is_plain(tensor: Any) -> bool:
    """Return whether stacked rows of a tensor have the same values and strides as the rows taken at once."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_nested
        and tensor.is_contiguous()
    )
