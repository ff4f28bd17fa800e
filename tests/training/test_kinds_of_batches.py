"""Evaluation of batches of every kind: rows are those that the sampler drew, whatever a batch looks like."""

from __future__ import annotations

import dataclasses
import warnings
from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset

from nb_accelerate import Accelerator
from nb_accelerate.utils import DataLoaderConfiguration, broadcast

ROWS, BATCH, LENGTH = 11, 4, 6


class Graph:
    """Several graphs joined as one, as graph libraries do: nodes of all of them, and no row for each."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        self.nodes = ids.repeat_interleave(3)

    def to(self, device: Any, non_blocking: bool = False) -> Graph:
        """Return it on a device."""
        return Graph(self.ids.to(device, non_blocking=non_blocking))


@dataclasses.dataclass
class Sample:
    """A batch with fields."""

    mask: torch.Tensor
    ids: torch.Tensor


Pair = namedtuple("Pair", ["grid", "ids"])


def ids_of(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def time_first(rows: list[int]) -> torch.Tensor:
    return ids_of(rows).expand(LENGTH, len(rows)).clone()  # (time, rows)


KINDS: dict[str, tuple[Any, Any]] = {  # what collate_fn makes of row numbers; the numbers that a model reads out of it
    "tensor": (ids_of, lambda batch: batch),
    "tuple": (lambda rows: (ids_of(rows), ids_of(rows).float()), lambda batch: batch[0]),
    "dict": (lambda rows: {"x": ids_of(rows)}, lambda batch: batch["x"]),
    "detection": (
        lambda rows: tuple(zip(*[(torch.full((row % 3 + 1, 4), row), {"id": row}) for row in rows], strict=True)),
        lambda batch: torch.tensor([target["id"] for target in batch[1]]),
    ),
    "list of dicts": (
        lambda rows: [{"boxes": torch.zeros(row % 3, 4), "id": torch.tensor(row)} for row in rows],
        lambda batch: torch.stack([one["id"] for one in batch]),
    ),
    "time first": (time_first, lambda batch: batch[0]),
    "flattened patches": (
        lambda rows: (ids_of(rows).repeat_interleave(5), ids_of(rows)),
        lambda batch: batch[0].reshape(-1, 5)[:, 0],
    ),
    "mask first": (lambda rows: (torch.ones(1, LENGTH, LENGTH), ids_of(rows)), lambda batch: batch[1]),
    "mask first by name": (lambda rows: Sample(torch.ones(1, LENGTH, LENGTH), ids_of(rows)), lambda batch: batch.ids),
    "graph": (lambda rows: Graph(ids_of(rows)), lambda batch: batch.nodes[::3]),
    "packed": (
        lambda rows: pack_sequence([torch.full((3,), row) for row in rows]),
        lambda batch: batch.data[: int(batch.batch_sizes[0])],
    ),
    "arrays": (lambda rows: {"x": np.array(rows)}, lambda batch: torch.from_numpy(batch["x"])),
    "array beside a tensor": (
        lambda rows: {"scale": torch.ones(3), "x": np.array(rows)},
        lambda batch: torch.from_numpy(batch["x"]),
    ),
    "sparse": (lambda rows: ids_of(rows).to_sparse(), lambda batch: batch.to_dense()),
    "sparse, other size": (
        lambda rows: torch.stack([torch.zeros(len(rows), dtype=torch.long), ids_of(rows)]).to_sparse(),
        lambda batch: batch.to_dense()[1],
    ),
    "nested": (
        lambda rows: torch.nested.nested_tensor([torch.full((row % 3 + 1,), float(row)) for row in rows]),
        lambda batch: torch.stack([one[0] for one in batch.unbind()]).long(),
    ),
    "grid beside rows": (lambda rows: {"grid": torch.zeros(7, 7), "x": ids_of(rows)}, lambda batch: batch["x"]),
    "grid in a named tuple": (lambda rows: Pair(torch.zeros(3), ids_of(rows)), lambda batch: batch.ids),
    "own mapping": (lambda rows: UserDict(step=torch.tensor(1.0), x=ids_of(rows)), lambda batch: batch["x"]),
    "texts": (lambda rows: [str(row) for row in rows], lambda batch: torch.tensor([int(text) for text in batch])),
    "numbers": (lambda rows: rows, torch.tensor),
    "object": (lambda rows: Graph(ids_of(rows)).__dict__, lambda batch: batch["ids"]),
}


class Rows(IterableDataset):
    """A stream of row numbers."""

    def __iter__(self):
        yield from range(ROWS)


def evaluated(way: str, kind: str, *, objects: bool = False) -> list[int]:
    """Return the row numbers that an evaluation gathers."""
    collate, read = KINDS[kind]
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
    loader = accelerator.prepare(DataLoader(dataset, collate_fn=collate, **options))
    found: list[int] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gather_for_metrics")
        for batch in loader:
            rows = read(batch)
            if objects or way == "own batches":
                found += accelerator.gather_for_metrics(rows.tolist(), use_gather_object=True)
            else:
                found += accelerator.gather_for_metrics(rows).tolist()
    return found


WAYS = ["plain", "split", "stateful", "stream", "own batches", "workers"]


@pytest.mark.parametrize("way", WAYS)
def test_an_evaluation_has_each_row_once_whatever_batches_look_like(run_ranks, way):
    kinds = [kind for kind in KINDS if way != "workers" or kind not in ("nested", "sparse", "sparse, other size")]

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
        assert all("has not one entry for each row" in one for one in said)
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
