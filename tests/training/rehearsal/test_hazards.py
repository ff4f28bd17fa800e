"""What ends runs, or spoils them, is found, with the line of the ranks; the same written well is not."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training.rehearsal.rehearsing import rehearsed

from nb_accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def prepared(accelerator: Accelerator, rows: int = 40, batch: int = 4) -> tuple[Any, Any, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    loader = DataLoader(TensorDataset(torch.ones(rows, 4)), batch_size=batch, shuffle=True)
    prepared: tuple[Any, Any, Any] = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    return prepared


def step(accelerator: Accelerator, model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), x[:, :1])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def epoch(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for (x,) in loader:
        step(accelerator, model, optimizer, x)


def save_state_on_rank_0(good: bool) -> None:
    accelerator = Accelerator(cpu=True)
    epoch(accelerator, *prepared(accelerator))
    if good or accelerator.process_index == 0:
        accelerator.save_state("checkpoint")  # here


def barrier_on_rank_0(good: bool) -> None:
    accelerator = Accelerator(cpu=True)
    epoch(accelerator, *prepared(accelerator))
    if accelerator.is_main_process:
        accelerator.save({"a": 1}, "a.pt")
        if not good:
            accelerator.wait_for_everyone()  # here
    if good:
        accelerator.wait_for_everyone()


def plain_barrier_on_rank_0(good: bool) -> None:
    accelerator = Accelerator(cpu=True)
    epoch(accelerator, *prepared(accelerator))
    if good or dist.get_rank() == 0:
        dist.barrier()  # here


def evaluation_on_rank_0(good: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    epoch(accelerator, model, optimizer, loader)
    if good or accelerator.is_main_process:
        for (x,) in loader:  # here
            accelerator.gather_for_metrics(model(x))


def reduce_for_the_log_of_rank_0(good: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    for number, (x,) in enumerate(loader):
        loss = step(accelerator, model, optimizer, x)
        if number % 2 == 0 and (good or accelerator.is_main_process):
            accelerator.reduce(loss.detach(), "mean")  # here


def uneven_ends(good: bool) -> None:
    config = DataLoaderConfiguration(even_batches=good)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model, optimizer, loader = prepared(accelerator, rows=36)
    for (x,) in loader:
        loss = F.mse_loss(model(x), x[:, :1])
        accelerator.backward(loss)  # here
        optimizer.step()


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(4)] * self.rows)


def shards_of_unequal_length(good: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = prepared(accelerator)
    for x in DataLoader(Stream(20 if good else 20 + 4 * accelerator.process_index), batch_size=4):
        accelerator.backward(F.mse_loss(model(x), x[:, :1]))  # here
        optimizer.step()


def gather_of_unequal_shapes(good: bool) -> None:
    config = DataLoaderConfiguration(even_batches=good)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model, optimizer, loader = prepared(accelerator, rows=30)
    for (x,) in loader:
        step(accelerator, model, optimizer, x)
        accelerator.gather(x)  # here


def a_plain_script(good: bool) -> None:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(5 if good else 3 + dist.get_rank()):
        loss = model(torch.full((2, 4), float(number))).mean()
        loss.backward()  # here
        optimizer.step()


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x)


def unused_parameters(good: bool) -> None:
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=good)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    _, _, loader = prepared(accelerator)
    model = HalfUsed()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for (x,) in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()  # here


def one_file_of_all_ranks(good: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    epoch(accelerator, model, optimizer, loader)
    if not good or accelerator.is_main_process:
        torch.save(model.state_dict(), "model.pt")  # here
    accelerator.wait_for_everyone()


def an_error_on_a_rank(good: bool) -> None:
    accelerator = Accelerator(cpu=True)
    epoch(accelerator, *prepared(accelerator))
    if not good and accelerator.is_last_process:
        raise KeyError("only here")  # here
    accelerator.wait_for_everyone()


def a_schedule_that_ends_early(good: bool) -> None:
    accelerator = Accelerator(cpu=True, scheduler_steps_per_process=not good)
    model, optimizer, loader = prepared(accelerator, rows=320)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / len(loader)))
    schedule = accelerator.prepare(schedule)
    for (x,) in loader:
        step(accelerator, model, optimizer, x)
        schedule.step()


def a_gather_inside_the_main_branch(good: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    for (x,) in loader:
        loss = step(accelerator, model, optimizer, x)
        everyone = accelerator.gather(loss.detach()) if good else None
        if accelerator.is_main_process:
            everyone = everyone if good else accelerator.gather(loss.detach())  # here
            accelerator.print(everyone.mean())


def batch_norm_on_rank_0(good: bool) -> None:
    """A forward of DistributedDataParallel sends the buffers of rank 0, in evaluation too."""
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    loader = DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    epoch(accelerator, model, optimizer, loader)
    if accelerator.is_main_process:
        evaluated = accelerator.unwrap_model(model) if good else model
        with torch.no_grad():
            evaluated.eval()(torch.ones(2, 4))  # here
    accelerator.wait_for_everyone()


def sets_of_other_sizes(good: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator, rows=40 if good else 40 + 16 * accelerator.process_index)
    for (x,) in loader:
        accelerator.backward(F.mse_loss(model(x), x[:, :1]))  # here
        optimizer.step()


HANGS = [
    (save_state_on_rank_0, "save_state", "the end"),
    (barrier_on_rank_0, "wait_for_everyone", "the end"),
    (plain_barrier_on_rank_0, "barrier", "the end"),
    (evaluation_on_rank_0, "loop over a loader", "the end"),
    (reduce_for_the_log_of_rank_0, "reduce", "gradients"),
    (uneven_ends, "gradients", "the end"),
    (shards_of_unequal_length, "gradients", "the end"),
    (gather_of_unequal_shapes, "gather of float32 (4, 4)", "gather of float32 (2, 4)"),
    (a_gather_inside_the_main_branch, "gather", "gradients"),
    (a_plain_script, "the end", "the gradients of Linear"),
    (sets_of_other_sizes, "gradients", "the end"),
    (batch_norm_on_rank_0, "the buffers of Sequential", "barrier"),
]
OTHERS = [
    (unused_parameters, "error", "2 parameters of HalfUsed"),
    (one_file_of_all_ranks, "file", "model.pt"),
    (an_error_on_a_rank, "error", "KeyError"),
    (a_schedule_that_ends_early, "rate", "is 0 from step 6 of 20"),
]


def line_of(function: Callable[..., Any]) -> int:
    """Return the line of a function that is marked as the one to be named."""
    lines, start = inspect.getsourcelines(function)
    return next(start + number for number, line in enumerate(lines) if line.rstrip().endswith("# here"))


@pytest.mark.parametrize(("function", "one", "other"), HANGS, ids=lambda value: getattr(value, "__name__", ""))
def test_where_ranks_part_is_found_with_what_both_do(
    function: Callable[[bool], None], one: str, other: str, tmp_path: Path
):
    found = rehearsed(function, False, folder=tmp_path)
    first = found.findings[0]
    assert first.kind == "hang"
    assert not found.ok
    assert one in first.text
    assert other in first.text
    assert f"test_hazards.py line {line_of(function)}" in first.text


@pytest.mark.parametrize(("function", "kind", "words"), OTHERS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_fails_or_is_spoilt_is_found(function: Callable[[bool], None], kind: str, words: str, tmp_path: Path):
    found = rehearsed(function, False, folder=tmp_path)
    text = next(finding.text for finding in found.findings if finding.kind == kind)
    assert words in text
    if "# here" in inspect.getsource(function):
        assert f"test_hazards.py line {line_of(function)}" in text


ALL = [row[0] for row in (*HANGS, *OTHERS)]


@pytest.mark.parametrize(
    "function",
    [*ALL[:3], *(pytest.param(one, marks=pytest.mark.slow) for one in ALL[3:])],
    ids=lambda function: function.__name__,
)
def test_what_is_written_well_raises_no_alarm(function: Callable[[bool], None], tmp_path: Path):
    assert rehearsed(function, True, folder=tmp_path).findings == []
