"""Rows, steps, learning rates and gathered rows of a rehearsal are those of real ranks, over the options of loaders."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training.rehearsal.rehearsing import rehearsed

from nb_accelerate import Accelerator, DataLoaderConfiguration, set_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fixtures.ranks import RunRanks


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((torch.full((4,), float(row)), torch.tensor(row)) for row in range(self.rows))


def options(number: int, world_size: int) -> dict[str, Any]:
    """Options of one loop, drawn by a number."""
    draw = random.Random(number)
    accumulation = draw.choice([1, 1, 3])  # windows of ranks with uneven ends close at other batches
    split, dispatch, stream = draw.random() < 0.3, draw.choice([None, True, False]), draw.random() < 0.25
    return {
        "rows": draw.choice([3, 17, 50, 64, 103]),
        "batch": draw.choice([4, 8]) * (world_size if split else 1),
        "epochs": draw.choice([1, 2]),
        "shuffle": not stream and draw.random() < 0.6,
        "drop_last": draw.random() < 0.3,
        "stream": stream,
        "accumulation": accumulation,
        "precision": draw.choice(["no", "no", "bf16"]),
        "skipped": draw.choice([0, 0, 1]),
        "config": {
            "split_batches": split,
            "dispatch_batches": dispatch,
            "even_batches": accumulation > 1 or dispatch is not None or stream or draw.random() < 0.8,
            "use_seedable_sampler": draw.random() < 0.7,
        },
    }


def loop(of: dict[str, Any]) -> dict[str, Any]:
    """Train as options say; return the rows of each batch, the rate of each step, and how many rows were gathered."""
    set_seed(7)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=of["accumulation"],
        mixed_precision=of["precision"],
        dataloader_config=DataLoaderConfiguration(**of["config"]),
    )
    rows = torch.arange(of["rows"])
    data: Any = Stream(of["rows"]) if of["stream"] else TensorDataset(rows[:, None].expand(-1, 4).float(), rows)
    loader: Any = DataLoader(data, batch_size=of["batch"], shuffle=of["shuffle"], drop_last=of["drop_last"])
    model: Any = nn.Linear(4, 1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=of["epochs"] * 60)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    seen, rates, gathered = [], [], 0
    with accelerator.join_uneven_inputs([model]):
        for number in range(of["epochs"]):
            batches = loader if number else accelerator.skip_first_batches(loader, of["skipped"])
            for x, row in batches:
                seen.append(row.tolist())
                with accelerator.accumulate(model):
                    accelerator.backward(F.mse_loss(model(x), x[:, :1]))
                    if accelerator.sync_gradients:
                        rates.append(optimizer.param_groups[0]["lr"])
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if of["config"]["even_batches"]:
                    gathered += len(accelerator.gather_for_metrics(row))
    return {"seen": seen, "rates": rates, "gathered": gathered}


def loops(numbers: list[int], world_size: int) -> list[dict[str, Any]]:
    return [loop(options(number, world_size)) for number in numbers]


def save_loops(numbers: list[int], world_size: int) -> None:
    torch.save(loops(numbers, world_size), "loops.pt")


def compare(numbers: list[int], world_size: int, run_ranks: RunRanks, folder: Path) -> None:
    real = run_ranks(loops, numbers, world_size, world_size=world_size)
    all_ranks = range(world_size)
    found = rehearsed(
        save_loops, numbers, world_size, folder=folder, world_size=world_size, ranks=all_ranks, seconds=120
    )
    assert found.ok, found
    for rank, trace in enumerate(found.traces):
        saved = torch.load(f"{folder}/{rank}{Path('loops.pt').absolute()}")
        for number, mine, its in zip(numbers, saved, real[rank], strict=True):
            assert mine == its, (rank, options(number, world_size))
        assert [rows for one in trace.passes for rows in one.rows] == [
            len(rows) for one in real[rank] for rows in one["seen"]
        ]
        assert trace.rates == [one["rates"] for one in real[rank]]


@pytest.mark.slow
@pytest.mark.limit(180)
def test_two_ranks_do_what_was_rehearsed(run_ranks: RunRanks, tmp_path: Path):
    compare(list(range(24)), 2, run_ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.limit(180)
def test_four_ranks_do_what_was_rehearsed(run_ranks: RunRanks, tmp_path: Path):
    compare(list(range(24, 72)), 4, run_ranks, tmp_path)
