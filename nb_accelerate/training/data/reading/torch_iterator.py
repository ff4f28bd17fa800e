"""Replace parts of the iterator of a torch loader by faster ones that yield the same batches.

Only where the loader reads in this process: workers make their own iterators. The same random numbers are drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.utils.data import BatchSampler, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from nb_accelerate.training.data.plan.samplers import SHUFFLING, BatchSamplerShard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.utils.data import DataLoader


def accelerated(batches: Any, loader: DataLoader[Any]) -> Iterator[Any]:
    """Return what ``iter(loader)`` returned, with faster parts where there are some. Called before its first batch."""
    if type(batches) is not _SingleProcessDataLoaderIter:
        return batches  # type: ignore[no-any-return]
    sampler: Any = loader.batch_sampler
    if sampler is not None and _is_of_tensors(loader.dataset) and loader.collate_fn is default_collate:
        batches._dataset_fetcher = _TensorFetcher(loader.dataset)  # noqa: SLF001 - torch's
    is_stream = isinstance(loader.dataset, IterableDataset)
    if type(sampler) is BatchSampler and type(sampler.sampler) in SHUFFLING and not is_stream:
        # torch's sampler converts all row numbers to a Python list before the first batch.
        batches._sampler_iter = iter(BatchSamplerShard(sampler, even_batches=False))  # noqa: SLF001 - torch's
    return _read(batches)


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


def _is_of_tensors(dataset: Any) -> bool:
    """Return whether a dataset is a `TensorDataset` of ordinary tensors, or a part of one, and no subclass."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(
        type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
        for tensor in dataset.tensors
    )
