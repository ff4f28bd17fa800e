"""Gradients that DistributedDataParallel did not see are averaged: each way trains as one process with all rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nb_accelerate import Accelerator, FullyShardedDataParallelPlugin

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks

STEPS = 6
ROWS = torch.linspace(-2, 2, STEPS * 4 * 3).sin().reshape(STEPS, 4, 3)


class Coder(nn.Module):
    """A model with a part of its own, as autoencoders have."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 4), nn.Linear(4, 3)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return self.encoder(rows).tanh()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encode(rows))


class Holder(nn.Module):
    """What was made around a model before it was prepared."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.model(rows) * 2


def error(outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return (outputs - rows).square().mean()


def losses_of(way: str, step: int, model: Any, original: Any, holder: Any, rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the losses of a step; each has a backward of its own."""
    if way == "unwrapped" or (way == "now and then" and step % 3 == 2) or way == "clipped":
        return [error(Accelerator().unwrap_model(model)(rows), rows)]
    if way == "module":
        return [error(getattr(model, "module", model)(rows), rows)]
    if way == "original":
        return [error(original(rows), rows)]
    if way == "holder":
        return [error(holder(rows), rows)]
    if way == "a part":
        return [original.encode(rows).square().mean()]
    if way == "a part beside":
        return [error(model(rows), rows), original.encode(rows).square().mean()]
    if way == "two backwards":
        outputs = model(rows)
        return [error(outputs, rows), outputs.abs().mean()]
    if way == "two forwards":
        first, second = model(rows), model(rows * 2)
        return [error(first, rows), error(second, rows)]
    if way == "checkpointed":
        return [error(checkpoint(original, rows, use_reentrant=False), rows)]
    if way == "checkpointed wrapper":
        return [error(checkpoint(model, rows, use_reentrant=False), rows)]
    if way == "reentrant":
        return [error(checkpoint(model, rows.clone().requires_grad_(), use_reentrant=True), rows)]
    return [error(model(rows), rows)]


WAYS = [
    "usual",
    "unwrapped",
    "module",
    "original",
    "holder",
    "a part",
    "a part beside",
    "two backwards",
    "two forwards",
    "checkpointed",
    "checkpointed wrapper",
    "reentrant",
    "now and then",
    "clipped",
]
SILENT = {"usual", "checkpointed wrapper", "reentrant"}
OPTIMIZERS = {"SGD": (torch.optim.SGD, 0.1), "Adam": (torch.optim.Adam, 0.01)}


def train(way: str, kind: str) -> list[torch.Tensor]:
    """Train on the rows of this rank; on one process without an Accelerator these are all."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    original = Coder()
    holder = Holder(original)
    optimizer_class, lr = OPTIMIZERS[kind]
    model, optimizer = accelerator.prepare(original, optimizer_class(original.parameters(), lr=lr))
    for step, rows in enumerate(ROWS):
        mine = rows[accelerator.process_index :: accelerator.num_processes]
        losses = losses_of(way, step, model, original, holder, mine)
        for number, loss in enumerate(losses):
            accelerator.backward(loss, retain_graph=number + 1 < len(losses))
        if way == "clipped":
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in original.parameters()]


def plain(way: str, kind: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Coder()
    holder = Holder(model)
    optimizer_class, lr = OPTIMIZERS[kind]
    optimizer = optimizer_class(model.parameters(), lr=lr)
    for step, rows in enumerate(ROWS):
        losses = losses_of(way, step, model, model, holder, rows)
        for number, loss in enumerate(losses):
            loss.backward(retain_graph=number + 1 < len(losses))
        if way == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@contextmanager
def told() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("nb_accelerate")
    log.addHandler(handler)
    yield said
    log.removeHandler(handler)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_way_trains_as_one_process_of_plain_pytorch_with_all_rows(run_ranks: RunRanks, kind: str):
    def all_ways() -> dict[str, tuple[list[torch.Tensor], list[str]]]:
        found = {}
        for way in WAYS:
            with told() as said:
                found[way] = (train(way, kind), said)
        return found

    first, second = run_ranks(all_ways)
    for way in WAYS:
        for one, other, expected in zip(first[way][0], second[way][0], plain(way, kind), strict=True):
            assert torch.equal(one, other), way
            torch.testing.assert_close(one, expected, rtol=0, atol=1e-6, msg=way)
        assert len(first[way][1]) == (way not in SILENT), (way, first[way][1])
        assert second[way][1] == []
    assert "not averaged these gradients" in first["original"][1][0]
    assert "not averaged all of" in first["two backwards"][1][0]


def test_what_one_rank_alone_adds_is_averaged_and_no_rank_waits(run_ranks: RunRanks):
    def branch() -> list[float]:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1, bias=False)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            loss = model(torch.ones(1, 1)).sum()
            accelerator.backward(loss, retain_graph=True)
            if accelerator.is_main_process:
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.unwrap_model(model).weight.flatten().tolist()

    first, second = run_ranks(branch)
    assert first == second


def test_an_earlier_wrapper_that_one_rank_still_has_decides_nothing(run_ranks: RunRanks):
    def phases() -> tuple[list[float], list[str]]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model, kept = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), []
        with told() as said:
            for trainable in (False, True):
                model[0].requires_grad_(trainable)
                optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
                wrapped, optimizer = accelerator.prepare(model, optimizer)
                for rows in ROWS:
                    mine = rows[accelerator.process_index :: accelerator.num_processes]
                    accelerator.backward(error(wrapped(mine), mine))
                    optimizer.step()
                    optimizer.zero_grad()
                kept += [wrapped] if accelerator.is_main_process else []
                del wrapped, optimizer  # so that other ranks have it no more
        return torch.cat([one.detach().flatten() for one in model.parameters()]).tolist(), said

    (first, said), (second, _) = run_ranks(phases)
    assert first == second
    assert said == []


def test_a_step_without_gradients_is_nothing_to_tell(run_ranks: RunRanks):
    def step_before_training() -> list[str]:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with told() as said:
            optimizer.step()
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
        return said

    assert run_ranks(step_before_training) == [[], []]


@pytest.mark.parametrize("world_size", [1, 2])
def test_nested_blocks_of_accumulate_average_the_gradients_of_both_models(run_ranks: RunRanks, world_size: int):
    def nested() -> list[list[float]]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        models = [nn.Linear(3, 1), nn.Linear(3, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        models, optimizers = (
            [accelerator.prepare(one) for one in models],
            [accelerator.prepare(one) for one in optimizers],
        )
        for rows in ROWS:
            mine = rows[accelerator.process_index :: accelerator.num_processes]
            with accelerator.accumulate(models[0]), accelerator.accumulate(models[1]):
                accelerator.backward((models[0](mine) * models[1](mine)).mean())
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        return [accelerator.unwrap_model(model).weight.flatten().tolist() for model in models]

    torch.manual_seed(0)
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    optimizer = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1)
    for rows in ROWS:  # each batch has two blocks, so it closes a window
        ((models[0](rows) * models[1](rows)).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(nested, world_size=world_size):
        for model, weight in zip(models, found, strict=True):
            assert weight == pytest.approx(model.weight.flatten().tolist(), abs=1e-6)


def test_a_parameter_in_the_place_of_another_is_averaged(run_ranks: RunRanks):
    def replace() -> tuple[list[float], int]:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1, bias=False)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inner = accelerator.unwrap_model(model)
        rank = accelerator.process_index
        with told() as said:
            for step in range(4):
                if step == 1:
                    inner.weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(1, 1))
                accelerator.backward(inner(torch.ones(1, 1) * (step + rank)).sum())
                optimizer.step()
                optimizer.zero_grad()
        return inner.weight.flatten().tolist(), sum("belong to no prepared model" in one for one in said)

    first, second = run_ranks(replace)
    assert first == ([pytest.approx(1 - 0.1 * (1.5 + 2.5 + 3.5))], 1)
    assert second == (first[0], 0)


def test_parameters_listed_before_prepare_train_sharded_when_they_are_added_later(run_ranks: RunRanks):
    def train_late(is_sharded: bool) -> list[torch.Tensor]:
        plugin = FullyShardedDataParallelPlugin() if is_sharded else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        torch.manual_seed(0)
        model = Coder()
        late = list(model.decoder.parameters())
        optimizer = torch.optim.Adam(model.encoder.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        for step, rows in enumerate(ROWS):
            if step == 2:
                optimizer.add_param_group({"params": late})
            accelerator.backward(error(model(rows), rows))
            optimizer.step()
            optimizer.zero_grad()
        return list(accelerator.get_state_dict(model).values())

    sharded, _ = run_ranks(train_late, True)
    for one, expected in zip(sharded, train_late(False), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-6)
