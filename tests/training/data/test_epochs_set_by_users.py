"""``set_epoch`` counts wherever users call it: on a dataset or sampler of theirs, or on what a prepared loader has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fixtures.ranks import RunRanks
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from nb_accelerate import Accelerator, DataLoaderConfiguration

ROWS = 16


class Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return index


def order_of(epoch: int) -> list[int]:
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()


class Own(Sampler):
    """It says in which epoch it is."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(order_of(self.epoch))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Private(Sampler):
    """It does not."""

    _epoch = 0

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(order_of(self._epoch))

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch


class OwnBatches(BatchSampler):
    """A batch sampler with an epoch, and a sampler without."""

    epoch = 0

    def __iter__(self):
        order = order_of(self.epoch)
        return (order[first : first + 2] for first in range(0, ROWS, 2))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stream(IterableDataset):
    """Not to be sharded."""

    epoch = 0

    def __iter__(self):
        return iter(order_of(self.epoch))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class PrivateStream(IterableDataset):
    _epoch = 0

    def __iter__(self):
        return iter(order_of(self._epoch))

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch


def stream_of_datasets() -> Any:
    import datasets

    rows = datasets.Dataset.from_dict({"row": list(range(ROWS))})
    return rows.to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=3)


def rows_of(batch: Any) -> list[int]:
    return (batch["row"] if isinstance(batch, dict) else batch).tolist()


def batched(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size=2, sampler=sampler)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "sampler": lambda: batched(Own()),
    "private": lambda: batched(Private()),
    "batches": lambda: DataLoader(Rows(), batch_sampler=OwnBatches([], 2, drop_last=False)),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "private stream": lambda: DataLoader(PrivateStream(), batch_size=2),
    "datasets": lambda: DataLoader(stream_of_datasets(), batch_size=2),
}
PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "the user's": lambda given, _: given.dataset if hasattr(given.dataset, "set_epoch") else given.sampler,
    "the user's batch sampler": lambda given, _: given.batch_sampler,
    "loader": lambda _, loader: loader,
    "loader.dataset": lambda _, loader: loader.dataset,
    "loader.sampler": lambda _, loader: loader.sampler,
    "loader.batch_sampler": lambda _, loader: loader.batch_sampler,
    "loader.batch_sampler.sampler": lambda _, loader: loader.batch_sampler.sampler,
}
OF_SAMPLERS = ("the user's", "loader", "loader.sampler", "loader.batch_sampler", "loader.batch_sampler.sampler")
CASES = [
    *(("sampler", place) for place in OF_SAMPLERS),
    *(("private", place) for place in OF_SAMPLERS),
    *(("batches", place) for place in ("the user's batch sampler", "loader", "loader.batch_sampler")),
    *((kind, place) for kind in ("stream", "private stream", "datasets") for place in ("the user's", "loader.dataset")),
]


def read(kind: str, place: str, *, skipped: int = 0, **options: Any) -> list[list[list[int]]]:
    """Set the epoch to 5 and to 7, and let it be; return the batches of each time."""
    torch.set_num_threads(1)
    given = LOADERS[kind]()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(given)
    found = []
    for epoch in (5, 7, None):
        reading = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        if epoch is not None:
            PLACES[place](given, reading).set_epoch(epoch)
        found.append([rows_of(batch) for batch in reading])
    return found


def expected(kind: str, epoch: int, world_size: int = 1, rank: int = 0) -> list[list[int]]:
    if kind != "datasets":
        order = order_of(epoch)
        batches = [order[first : first + 2] for first in range(0, ROWS, 2)]
        return batches[rank::world_size]
    data = stream_of_datasets()
    part = data.shard(num_shards=world_size, index=rank) if world_size > 1 else data
    part.set_epoch(epoch)
    rows = [row["row"] for row in part]
    return [rows[first : first + 2] for first in range(0, len(rows), 2)]


@pytest.mark.parametrize(("kind", "place"), CASES)
def test_one_process_is_in_the_epoch_that_was_set(kind: str, place: str):
    pytest.importorskip("datasets")
    first, second, _ = read(kind, place)
    assert [first, second] == [expected(kind, 5), expected(kind, 7)]
    if kind in ("sampler", "private", "batches"):
        assert read(kind, place, skipped=2)[:2] == [expected(kind, 5)[2:], expected(kind, 7)[2:]]


@pytest.mark.slow
def test_ranks_are_in_the_epoch_that_was_set(run_ranks: RunRanks):
    pytest.importorskip("datasets")

    def all_cases() -> list[Any]:
        from training.data.test_epochs_set_by_users import CASES, read

        return [
            (kind, place, options, read(kind, place, **options))
            for kind, place in CASES
            for options in ({}, {"dispatch_batches": False}, {"dispatch_batches": True})
        ]

    alone = {case: read(*case) for case in CASES}
    ranks = run_ranks(all_cases, start_method="fork")  # datasets, which take long to import, are here already
    for rank, found in enumerate(ranks):
        for kind, place, options, epochs in found:
            world_size, part = (2, rank) if kind != "datasets" or options != {"dispatch_batches": True} else (1, 0)
            then = [expected(kind, 5, world_size, part), expected(kind, 7, world_size, part)]
            if world_size == 1:
                then = [batches[rank::2] for batches in then]
            assert epochs[:2] == then, (kind, place, options, rank)
            if kind != "datasets":  # and without being told, as alone
                assert epochs[2] == alone[kind, place][2][rank::2], (kind, place, options, rank)
