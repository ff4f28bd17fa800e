"""Prepared loaders that read in this process replace parts of torch's iterator, and yield the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, IterableDataset

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
    """A prepared loader takes a whole piece at once; torch's loader of the same shard asks row by row."""
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
