"""What only tells about a run never stops it."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.accelerator.losses import LossReport, MemoryReport
from nb_accelerate.training.strategies.model_memory import measure
from nb_accelerate.training.tracking import GeneralTracker


def train() -> list[float]:
    """Train in a loop over a loader; return the weights."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(torch.arange(24.0).reshape(8, 3) / 24), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1), loader)
    for _ in range(2):
        for (inputs,) in loader:
            optimizer.zero_grad()
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
    return accelerator.unwrap_model(model).weight.flatten().tolist()


def train_with_faults() -> tuple[list[float], list[float], list[str]]:
    """Train as it is, then with a report that fails wherever there is one; return both weights, and what was said."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nb_accelerate").addHandler(handler)
    expected = train()

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("broken")

    MemoryReport.measured = fail  # type: ignore[method-assign,assignment]
    LossReport._report_loss = fail  # type: ignore[method-assign,assignment]
    return expected, train(), [line for line in said if "Training goes on without" in line]


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_with_the_same_numbers_if_reports_fail(run_ranks: Any, ranks: int):
    for expected, found, said in run_ranks(train_with_faults, world_size=ranks):
        assert found == expected
        assert any("failed (ValueError: broken)" in line for line in said)
        assert any("figures of loss" in line for line in said)
        assert len(said) == len(set(said))


def train_unusual(kind: str) -> float:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    if kind == "sparse":
        model: nn.Module = nn.EmbeddingBag(10, 4, sparse=True)
        optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        inputs = torch.tensor([[1, 2]])
    else:
        model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        inputs = torch.ones(2, 3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(inputs).sum()
        accelerator.backward(loss)
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("kind", ["sparse", "lazy"])
def test_sparse_gradients_and_lazy_modules_are_trained(run_ranks: Any, caplog: pytest.LogCaptureFixture, kind: str):
    [found] = run_ranks(train_unusual, kind, world_size=1)
    assert found < train_first_loss(kind)
    assert train_unusual(kind) == pytest.approx(found)
    assert "Training goes on without" not in caplog.text


def train_first_loss(kind: str) -> float:
    torch.manual_seed(0)
    if kind == "sparse":
        return float(nn.EmbeddingBag(10, 4, sparse=True)(torch.tensor([[1, 2]])).sum())
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))
    return float(model(torch.ones(2, 3)).sum())


def test_sparse_gradients_are_measured_by_their_parts():
    model = nn.EmbeddingBag(10, 4, sparse=True)
    model(torch.tensor([[1, 2]])).sum().backward()
    found = measure([model], [])
    assert (found.parameters, found.gradients) == (160, 2 * 4 * 4 + 2 * 8)


class Strict(GeneralTracker):
    name = "strict"
    requires_logging_directory = False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}
        self.logged: list[dict[str, Any]] = []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append({name: float(value) for name, value in values.items()})


@dataclass
class Settings:
    rate: float = 0.1


def test_what_a_tracker_does_not_take_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture):
    tracker = Strict()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    for config in ({"rate": 0.1}, argparse.Namespace(rate=0.1), Settings()):
        accelerator.init_trackers("run", config=config)
        assert tracker.config == {"rate": 0.1}
    for step in range(2):
        accelerator.log({"loss": 1.0, "val_loss": None, "rate": 0.5}, step=step)
    accelerator.log({"val_loss": 0.25}, step=2)
    assert tracker.logged == 2 * [{"loss": 1.0}, {"rate": 0.5}] + [{"val_loss": 0.25}]
    assert caplog.text.count("take 'val_loss'") == 1
    accelerator.end_training()


def test_tensorboard_goes_on_without_what_it_cannot_draw(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    pytest.importorskip("tensorboard")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0, "val_loss": None}, step=0)
    accelerator.end_training()
    assert "take 'val_loss'" in caplog.text
