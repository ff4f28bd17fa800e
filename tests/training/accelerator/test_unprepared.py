"""Training with what was not prepared is told when there are several ranks."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from nb_accelerate.notebook.worker.trained_models import TrainedModels

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks


def collect_what_is_said() -> list[str]:
    """Return a list to which what the package logs from now on is added."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nb_accelerate").addHandler(handler)
    return said


def train_by_hand(kind: str) -> list[str]:
    from torch.nn.parallel import DistributedDataParallel

    from nb_accelerate import Accelerator
    from nb_accelerate.local_sgd import LocalSGD

    said = collect_what_is_said()
    accelerator = Accelerator()
    model: nn.Module = nn.Linear(1, 1)
    if kind == "averaged":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = nn.Linear(1, 1)
    if kind == "not kept":
        accelerator.prepare(model, optimizer)
    if kind == "accumulating":
        accelerator.gradient_accumulation_steps = 2
        model = accelerator.prepare(model)
    if kind == "in part":
        other = accelerator.prepare(other)
    if kind in {"prepared", "apart"}:
        model, optimizer = accelerator.prepare(model, optimizer)
    local = LocalSGD(accelerator, model, local_sgd_steps=2) if kind == "apart" else nullcontext()
    with local:
        for _ in range(2):
            with accelerator.accumulate(model) if kind == "accumulating" else nullcontext():
                model(torch.ones(2, 1)).sum().backward()
                optimizer.step()
    return said


@pytest.mark.parametrize("kind", ["nothing", "not kept", "accumulating", "in part"])
def test_ranks_whose_first_step_no_exchange_precedes_are_told_so_once(run_ranks: RunRanks, kind: str):
    first, second = run_ranks(train_by_hand, kind)
    assert len(first) == 1
    assert first[0].startswith("No gradients were exchanged, so each of the 2 processes trains a model of its own ")
    assert second == []


def train_without_accelerator(kind: str) -> list[str]:
    said = collect_what_is_said()
    if kind == "averaged":
        torch.distributed.init_process_group("gloo")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 1)).sum().backward()
        if kind == "averaged":
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
    return said


def test_ranks_that_train_without_an_accelerator_are_told_so_once(run_ranks: RunRanks):
    first, second = run_ranks(train_without_accelerator, "alone")
    assert len(first) == 1
    assert first[0].startswith("No gradients were exchanged")
    assert second == []
    assert run_ranks(train_without_accelerator, "averaged") == [[], []]
    assert run_ranks(train_without_accelerator, "alone", world_size=1) == [[]]


def test_a_rank_that_answers_many_calls_looks_at_steps_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    hooks: list[object] = []
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "register_optimizer_step_pre_hook", hooks.append)
    models = TrainedModels()
    for _ in range(3):
        models.begin()
    assert len(hooks) == 1


@pytest.mark.parametrize("kind", ["averaged", "prepared", "apart"])
def test_ranks_whose_gradients_are_averaged_are_not(run_ranks: RunRanks, kind: str):
    assert run_ranks(train_by_hand, kind) == [[], []]
