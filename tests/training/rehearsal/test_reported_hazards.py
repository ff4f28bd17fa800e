"""Runs that people reported to hang or fail on several GPUs: a rehearsal names the line, and finds nothing once mended.

The docstrings name the reports.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from tqdm.auto import tqdm
from training.rehearsal.rehearsing import rehearsed
from training.rehearsal.test_hazards import epoch, line_of, prepared, step

from nb_accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def evaluation_when_the_bar_of_rank_0_says(good: bool) -> None:
    """huggingface/transformers#31532."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    bar = tqdm(range(len(loader)), disable=not accelerator.is_main_process)
    for done, (x,) in enumerate(loader, 1):
        step(accelerator, model, optimizer, x)
        bar.update(1)
        if (done if good else bar.n) == 3:
            accelerator.gather_for_metrics(model(x))  # here


def sharded() -> tuple[Any, Any, Any, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    return (accelerator, *prepared(accelerator))


def save_state_of_shards_on_rank_0(good: bool) -> None:
    """huggingface/accelerate#2000."""
    accelerator, model, optimizer, loader = sharded()
    epoch(accelerator, model, optimizer, loader)
    accelerator.wait_for_everyone()
    if good or accelerator.is_main_process:
        accelerator.save_state("checkpoint")  # here


def weights_of_shards_on_rank_0(good: bool) -> None:
    """A comment in pytorch/pytorch#148756."""
    accelerator, model, optimizer, loader = sharded()
    epoch(accelerator, model, optimizer, loader)
    weights = accelerator.get_state_dict(model) if good else {}
    if accelerator.is_main_process:
        weights = weights or accelerator.get_state_dict(model)  # here
        accelerator.save(weights, "model.pt")


def inference_with_shards_on_rank_0(good: bool) -> None:
    """huggingface/accelerate#2081."""
    accelerator, model, optimizer, loader = sharded()
    for _ in range(2):
        epoch(accelerator, model, optimizer, loader)
        if good or accelerator.is_main_process:
            with torch.no_grad():
                model(torch.ones(2, 4))  # here


def early_stop_of_rank_0(good: bool) -> None:
    """speechbrain/speechbrain#2051."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    without_progress = 0
    for _ in range(6):
        for (x,) in loader:  # here
            step(accelerator, model, optimizer, x)
        if good or accelerator.is_main_process:
            without_progress += 1
        if without_progress == 3:
            break


def subset_that_each_rank_draws(good: bool) -> None:
    """Lightning-AI/pytorch-lightning#9851."""
    accelerator = Accelerator(cpu=True)
    random.seed(0 if good else accelerator.process_index)
    drawn = [row for row in range(60) if random.random() < 0.5]
    model: Any = nn.Linear(4, 1)
    loader: Any = DataLoader(Subset(TensorDataset(torch.ones(60, 4)), drawn))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for (x,) in loader:
        accelerator.backward(model(x).mean())  # here
        optimizer.step()


def half_of_a_barrier(good: bool) -> None:
    """huggingface/datasets#2298 has both halves."""
    accelerator = Accelerator(cpu=True)
    if accelerator.local_process_index > 0:
        dist.barrier()  # here
    rows = 40
    if good and accelerator.local_process_index == 0:
        dist.barrier()
    epoch(accelerator, *prepared(accelerator, rows))


def layer_of_rank_0(good: bool) -> None:
    """A model that depends on the rank, which torch refuses."""
    accelerator = Accelerator(cpu=True)
    layers = [nn.Linear(4, 4), *([nn.Linear(4, 4)] if not good and accelerator.is_main_process else ())]
    model = nn.Sequential(*layers)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))  # here


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, *, other: bool) -> Any:
        return self.other(x) if other else self.one(x)


def head_of_each_rank(good: bool) -> None:
    """pytorch/pytorch#112152."""
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=good)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model: Any = Heads()
    loader: Any = DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for (x,) in loader:
        accelerator.backward(model(x, other=accelerator.is_main_process).mean())
        optimizer.step()  # here


def folder_that_all_ranks_make(good: bool) -> None:
    """Lightning-AI/pytorch-lightning#529."""
    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        os.makedirs("runs/first", exist_ok=good)  # here
    epoch(accelerator, *prepared(accelerator))


def early_stop_by_the_loss_of_each_rank(good: bool) -> None:
    """Lightning-AI/pytorch-lightning#379."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    best = 1e9
    for _ in range(4):
        for (x,) in loader:
            loss = step(accelerator, model, optimizer, x)
        if not good and loss.item() > best:  # here
            break


REPORTED: list[tuple[Callable[[bool], None], str, str]] = [
    (evaluation_when_the_bar_of_rank_0_says, "hang", "gather_for_metrics"),
    (early_stop_of_rank_0, "hang", "rank 0 at the end"),
    (half_of_a_barrier, "hang", "barrier"),
    (save_state_of_shards_on_rank_0, "hang", "save_state"),
    (weights_of_shards_on_rank_0, "hang", "get_state_dict"),
    (inference_with_shards_on_rank_0, "hang", "the shards of Sequential"),
    (subset_that_each_rank_draws, "hang", "the gradients of Linear"),
    (layer_of_rank_0, "hang", "the weights of Sequential, 40 in 4 tensors"),
    (head_of_each_rank, "error", "2 parameters of Heads got no gradient"),
    (folder_that_all_ranks_make, "error", f"File exists: '{os.getcwd()}/runs/first'"),
    (early_stop_by_the_loss_of_each_rank, "invented", "may be otherwise in a run"),
]


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [*REPORTED[:3], *(pytest.param(*each, marks=pytest.mark.slow) for each in REPORTED[3:])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_reported_hazard_is_found_with_its_line(
    function: Callable[[bool], None], kind: str, words: str, tmp_path: Path
):
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.mkdir()
    good.mkdir()
    first = rehearsed(function, False, folder=bad).findings[0]
    assert first.kind == kind
    assert words in first.text
    assert f"test_reported_hazards.py line {line_of(function)}" in first.text
    assert rehearsed(function, True, folder=good).findings == []
