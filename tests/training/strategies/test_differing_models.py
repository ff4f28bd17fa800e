"""Models of which each rank has a whole one are told when they differ, and are equal once they are prepared again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks


def train(kind: str) -> tuple[list[str], float]:
    from nb_accelerate import Accelerator
    from nb_accelerate.local_sgd import LocalSGD

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nb_accelerate").addHandler(handler)
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.rand(8, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def epoch() -> None:
        for (batch,) in loader:
            accelerator.backward(model(batch).square().sum())
            optimizer.step()
            optimizer.zero_grad()

    def evaluate() -> None:
        with torch.no_grad():
            for (batch,) in loader:
                model(batch)

    epoch()
    if kind == "evaluated by one" and accelerator.is_main_process:
        evaluate()
    if kind == "local":
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=100):
            epoch()
            evaluate()
    if kind in ("other weights", "evaluated", "repaired"):
        best = {"weight": torch.full((1, 1), 1.0 + accelerator.process_index), "bias": torch.zeros(1)}
        accelerator.unwrap_model(model).load_state_dict(best)
    if kind == "repaired":
        model = accelerator.prepare(model)
    if kind == "evaluated":
        evaluate()
        accelerator.wait_for_everyone()
        evaluate()
    else:
        epoch()
        epoch()
    return said, accelerator.unwrap_model(model).weight.item()


def test_weights_that_differ_are_told_once(run_ranks: RunRanks):
    for kind in ("other weights", "evaluated"):
        (first, weight), (second, other) = run_ranks(train, kind)
        assert len(first) == 1
        assert first[0].startswith("for (batch,) in loader: the weights on rank 1 are not those on rank 0, as after ")
        assert second == []
        assert weight != other


def test_weights_that_were_prepared_again_are_those_of_rank_0(run_ranks: RunRanks):
    (first, weight), (second, other) = run_ranks(train, "repaired")
    assert first == second == []
    assert weight == other


def test_ranks_that_evaluate_alone_or_train_apart_on_purpose_are_not_told(run_ranks: RunRanks):
    assert [said for said, _ in run_ranks(train, "evaluated by one")] == [[], []]
    assert [said for said, _ in run_ranks(train, "local")] == [[], []]
