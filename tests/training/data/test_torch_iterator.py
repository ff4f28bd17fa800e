"""Prepared loaders that read in this process replace parts of torch's iterator, and yield the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import collate as torch_collate

from nb_accelerate.data_loader import IterableDatasetShard, prepare_data_loader


class Stream(IterableDataset[int]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rows))


@pytest.mark.parametrize(
    ("rows", "drop_last", "even"),
    [(19, False, True), (19, False, False), (19, True, True), (16, False, True), (3, False, True), (0, False, True)],
)
def test_a_batch_of_a_stream_is_made_of_a_list_as_in_a_loader_of_torch(rows: int, drop_last: bool, even: bool) -> None:
    seen: list[object] = []

    def collate(piece: list[int]) -> list[int]:
        assert type(piece) is list
        seen.append(None)
        return [10 * row for row in piece]

    for rank in range(2):
        loader = DataLoader(Stream(rows), batch_size=4, drop_last=drop_last, collate_fn=collate)
        prepared = prepare_data_loader(
            loader, num_processes=2, process_index=rank, dispatch_batches=False, even_batches=even
        )
        shard = IterableDatasetShard(Stream(rows), 4, drop_last, num_processes=2, process_index=rank, even_batches=even)
        wanted = DataLoader(shard, batch_size=4, drop_last=drop_last, collate_fn=collate)
        for _ in range(2):
            assert list(prepared) == list(wanted)
    assert seen or not rows or drop_last


class OtherRows(TensorDataset):
    """A subclass, which may do anything with its rows."""


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("part", [None, [9, 1, 1, -2, 0], torch.tensor([3, 2, 1, 0])])
def test_rows_of_tensors_that_are_taken_at_once_are_those_that_torch_stacks(part: Any, shuffle: bool) -> None:
    tensors = TensorDataset(torch.arange(66.0).reshape(11, 2, 3), torch.arange(11), torch.arange(11) % 2 == 0)
    data = tensors if part is None else Subset(Subset(tensors, range(11)), part)
    plain = DataLoader(data, batch_size=4, shuffle=shuffle, generator=torch.Generator().manual_seed(3))
    wanted = list(plain)
    assert plain.generator is not None
    plain.generator.manual_seed(3)
    for got, batch in zip(prepare_data_loader(plain, put_on_device=False), wanted, strict=True):
        assert type(got) is list
        for one, other in zip(got, batch, strict=True):
            assert torch.equal(one, other)
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())


def test_rows_of_tensors_are_taken_at_once_only_where_nobody_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[object] = []
    stacked = torch_collate.collate_tensor_fn

    def count(rows: Any, **options: Any) -> torch.Tensor:
        fetched.append(None)
        return stacked(rows, **options)

    def stacks(data: Any, **options: Any) -> int:
        """Return how many tensors torch stacked for the rows of a dataset."""
        fetched.clear()
        loader = prepare_data_loader(DataLoader(data, batch_size=4, **options), put_on_device=False)
        assert sum(len(batch[1]) for batch in loader) == len(data)
        return len(fetched)

    monkeypatch.setitem(torch_collate.default_collate_fn_map, torch.Tensor, count)
    whole = torch.arange(8.0)
    assert stacks(TensorDataset(whole, whole)) == 0
    assert stacks(TensorDataset(whole, whole), collate_fn=partial(default_collate)) == 4
    assert stacks(OtherRows(whole, whole)) == 4


def test_a_profiler_sees_the_batches_that_are_read_while_it_runs() -> None:
    loader = prepare_data_loader(DataLoader(TensorDataset(torch.arange(20.0)), batch_size=2), put_on_device=False)
    batches = iter(loader)
    next(batches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            next(batches)
    rest = list(batches)
    assert len(rest) == 6
    assert torch.equal(rest[-1][0], torch.tensor([18.0, 19.0]))
    noted = [event.count for event in profile.key_averages() if event.key.startswith("enumerate(DataLoader)")]
    assert noted == [3]


def test_a_stream_that_is_longer_than_it_says_is_warned_of_as_by_torch() -> None:
    class Longer(Stream):
        def __len__(self) -> int:
            return 4

    loader = prepare_data_loader(DataLoader(Longer(8), batch_size=1), put_on_device=False, dispatch_batches=False)
    assert len(list(loader)) == 8
    len(loader)
    with pytest.warns(UserWarning, match="samples have been fetched"):
        assert len(list(loader)) == 8
