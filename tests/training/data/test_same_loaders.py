"""Loaders whose rows differ between ranks are named when they are prepared; those that are alike are not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks

ROWS = 2000


class Frame(Dataset[Any]):
    def __init__(self, order: np.ndarray[Any, Any]) -> None:
        self.texts = [f"row {number}" for number in order]
        self.order: Any = None
        self.rank = order[0]  # says nothing of the rows

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        raise AssertionError("rows are not read")


def loader_of(kind: str) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(ROWS).float()[:, None])
    order = np.random.permutation(ROWS)
    half: Any = order[: ROWS // 2].tolist()
    if kind == "Subset.indices":
        return DataLoader(Subset(data, half), batch_size=4)
    if kind == "TensorDataset.tensors":
        return DataLoader(TensorDataset(data.tensors[0][order]), batch_size=4)
    if kind == "SubsetRandomSampler.indices":
        return DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(half))
    if kind == "WeightedRandomSampler.weights":
        return DataLoader(data, batch_size=4, sampler=WeightedRandomSampler(order.tolist(), 8))
    if kind == "Frame.texts":
        return DataLoader(ConcatDataset([data, Frame(order)]), batch_size=4)
    assert kind == "dataset"
    return DataLoader([(float(row), row) for row in order], batch_size=4)  # type: ignore[arg-type]


def prepare(kinds: list[str], seed: int | None) -> list[str]:
    from nb_accelerate import Accelerator

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nb_accelerate").addHandler(handler)
    accelerator = Accelerator()
    for kind in kinds:
        np.random.seed(accelerator.process_index if seed is None else seed)
        accelerator.prepare(nn.Linear(1, 1), loader_of(kind))
    return said


KINDS = [
    "Subset.indices",
    "TensorDataset.tensors",
    "SubsetRandomSampler.indices",
    "WeightedRandomSampler.weights",
    "Frame.texts",
    "dataset",
]


def test_rows_that_differ_are_told_with_where_they_differ_and_the_line(run_ranks: RunRanks):
    first, second = run_ranks(prepare, KINDS, None)
    line = (
        "accelerator.prepare(nn.Linear(1, 1), loader_of(kind)): loader number 1 has other rows on rank 1 than on rank 0"
    )
    assert [text.partition(" differs)")[0] for text in first] == [f"{line} ({kind}" for kind in KINDS]
    assert second == []


def test_rows_that_are_the_same_are_not(run_ranks: RunRanks):
    assert run_ranks(prepare, KINDS, 0) == [[], []]


def test_a_split_without_a_seed_is_the_same_on_all_ranks(run_ranks: RunRanks):
    first, second = run_ranks(lambda: np.random.permutation(ROWS).tolist())
    assert first == second
