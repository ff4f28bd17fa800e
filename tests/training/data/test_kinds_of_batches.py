"""Evaluation of batches of every kind: rows are those that the sampler drew, whatever a batch looks like."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fixtures.batch_kinds import KINDS
from torch.utils.data import DataLoader, IterableDataset

from nb_accelerate import Accelerator
from nb_accelerate.utils import DataLoaderConfiguration, broadcast

ROWS, BATCH = 11, 4


class Rows(IterableDataset):
    """A stream of row numbers."""

    def __iter__(self):
        yield from range(ROWS)


def evaluated(way: str, kind: str) -> list[int]:
    """Return the row numbers that an evaluation gathers."""
    kind_of_batch = KINDS[kind]
    config = DataLoaderConfiguration(
        split_batches=way == "split", use_stateful_dataloader=way == "stateful", dispatch_batches=False
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    dataset = Rows() if way == "stream" else range(ROWS)
    options: dict[str, Any] = {"batch_size": BATCH}
    if way == "own batches":  # of no fixed size
        options = {"batch_sampler": [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9], [10]]}
    if way == "workers":
        options["num_workers"] = 1
    loader = accelerator.prepare(DataLoader(dataset, collate_fn=kind_of_batch.make, **options))
    found: list[int] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gather_for_metrics")
        for batch in loader:
            rows = kind_of_batch.rows_of(batch)
            if way == "own batches":
                found += accelerator.gather_for_metrics(rows, use_gather_object=True)
            else:
                found += accelerator.gather_for_metrics(torch.tensor(rows)).tolist()
    return found


WAYS = ["plain", "split", "own batches"]
WAYS += [pytest.param(way, marks=pytest.mark.slow) for way in ("stateful", "stream", "workers")]


@pytest.mark.parametrize("way", WAYS)
def test_an_evaluation_has_each_row_once_whatever_batches_look_like(run_ranks, way):
    kinds = [kind for kind in KINDS if way != "workers" or kind not in ("nested", "jagged", "sparse")]

    def every(kinds: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for kind in kinds:
            try:
                found[kind] = evaluated(way, kind)
            except Exception as error:
                found[kind] = repr(error)
        return found

    for found in [every(kinds), *run_ranks(every, kinds, deadline=55)]:
        assert {kind: rows for kind, rows in found.items() if rows != list(range(ROWS))} == {}


def test_several_entries_for_a_row_are_left_out_with_it(run_ranks):
    def patches():
        accelerator = Accelerator(cpu=True)
        tensors, objects = [], []
        for batch in accelerator.prepare(DataLoader(range(ROWS), batch_size=BATCH)):
            tensors += accelerator.gather_for_metrics(batch.repeat_interleave(3)).tolist()
            objects += accelerator.gather_for_metrics([str(row) for row in batch.tolist() for _ in range(2)])
        return tensors, objects

    tensors = [row for row in range(ROWS) for _ in range(3)]
    assert run_ranks(patches) == [(tensors, [str(row) for row in range(ROWS) for _ in range(2)])] * 2


def test_values_that_are_not_about_rows_come_as_they_are_and_with_a_warning(run_ranks):
    def ask(rows: int):
        accelerator = Accelerator(cpu=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in accelerator.prepare(DataLoader(range(rows), batch_size=BATCH)):
                grid, ids = accelerator.gather_for_metrics((torch.ones(7), batch))
                objects = accelerator.gather_for_metrics(["a", "b", "c"])
        return len(grid), len(ids), len(objects), [str(one.message) for one in caught]

    for rank, (grid, ids, objects, said) in enumerate(run_ranks(ask, 9)):
        assert (grid, ids, objects) == (14, 1, 6)
        assert len(said) == (0 if rank else 2)
        assert all("not one entry for" in one for one in said)
    assert [found[3] for found in run_ranks(ask, 16)] == [[], []]


def test_a_column_of_a_tensor_is_exchanged_by_itself(run_ranks):
    def exchange():
        accelerator = Accelerator(cpu=True)
        table = torch.arange(8.0).reshape(4, 2)
        found = []
        for column in (table[:, 1], table[:1, 1]):
            found.append(accelerator.gather(column).tolist())
            found.append(accelerator.reduce(column, "sum").tolist())
            found.append(broadcast(column).tolist())
        return found

    whole, first = [1.0, 3.0, 5.0, 7.0], [1.0]
    expected = [whole * 2, [2 * one for one in whole], whole, first * 2, [2.0], first]
    assert run_ranks(exchange) == [expected, expected]
