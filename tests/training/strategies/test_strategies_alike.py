"""What every strategy promises, asked of each: the numbers of one process in plain PyTorch on the same rows.

A strategy that cannot do something is in the table with what it says instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from nb_accelerate.base.config.parallelism import ParallelismConfig, TorchTensorParallelConfig
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.process import context

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 26
ROWS = 8  # of all ranks together, in a batch
NUM_ROWS = STEPS * ROWS - 3  # the last batch is not full: its first rows are given twice
WIDTH = 5  # does not divide evenly
MAX_NORM = 0.5
ACCUMULATE = 4  # the last window is of two batches

TENSOR = TorchTensorParallelConfig(plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})


def layout(**sizes: int) -> dict[str, Any]:
    return {"parallelism_config": ParallelismConfig(tp_handler=TENSOR, **sizes)}


PLANS: dict[str, dict[str, Any]] = {
    "one process": {},
    "ddp": {},
    "fsdp": {"fsdp_plugin": Plugin()},
    "fsdp, whole checkpoints": {"fsdp_plugin": Plugin(state_dict_type="FULL_STATE_DICT", min_num_params=50)},
    "tensor parallel": layout(tp_size=2),
    "fsdp x tensor parallel": layout(dp_shard_size=2, tp_size=2),
    "hsdp 2 x 2": {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)},
    "ddp x tensor parallel": layout(dp_replicate_size=2, tp_size=2),
}
WORLD_SIZES = {"one process": 1, "hsdp 2 x 2": 4, "fsdp x tensor parallel": 4, "ddp x tensor parallel": 4}
"""Ranks of a strategy; 2 where nothing is said."""

slow = pytest.mark.slow
FAST = {"one process", "fsdp", "tensor parallel"}
EVERY = [pytest.param(name, marks=[] if name in FAST else [slow]) for name in PLANS]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(x))


def make_data() -> TensorDataset:
    inputs = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), torch.arange(NUM_ROWS))


def make_optimizer(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def train_by_hand(name: str, begin: int = 0) -> tuple[list[float], list[float], list[torch.Tensor]]:
    """The same training in one process of plain PyTorch."""
    model = Model()
    optimizer, scheduler = make_optimizer(model)
    inputs, targets, _ = make_data().tensors
    if name not in {"one process", "tensor parallel"}:  # which have a shorter batch at the end
        inputs, targets = (torch.cat([whole, whole[:3]]) for whole in (inputs, targets))
    losses, norms = [], []
    for step in range(STEPS):
        rows = slice(step * ROWS, (step + 1) * ROWS)
        loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
        losses.append(loss.item())
        (loss / ACCUMULATE).backward()
        if (step + 1) % ACCUMULATE == 0 or step + 1 == STEPS:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses[begin:], norms[begin // ACCUMULATE :], [weight.detach() for weight in model.parameters()]


def readers(accelerator: Accelerator) -> int:
    """The number of ranks, or groups of ranks, with rows of their own."""
    layout = accelerator.parallelism_config
    return accelerator.num_processes if layout is None else layout.data_parallel_size


def make(name: str, seed: int) -> tuple[Any, ...]:
    context.reset()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=ACCUMULATE, scheduler_steps_per_process=False, **PLANS[name]
    )
    model = Model(seed=seed + accelerator.process_index)  # all ranks train that of rank 0
    loader = DataLoader(make_data(), batch_size=ROWS // readers(accelerator))
    return (accelerator, *accelerator.prepare(model, *make_optimizer(model), loader))


def train(name: str, folder: Path | None, seed: int = 0, begin: int = 0, save_at: int = -1) -> Any:
    accelerator, model, optimizer, scheduler, loader = make(name, seed)
    if begin and folder is not None:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, begin)
    losses, norms, rows = [], [], []
    for step, (inputs, targets, numbers) in enumerate(loader, begin):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            rows += accelerator.gather_for_metrics(numbers).tolist()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step + 1 == save_at:
            accelerator.save_state(folder)
    state = accelerator.get_state_dict(model)
    assert sorted(rows) == list(range(begin * ROWS, NUM_ROWS))  # each once, none twice
    return losses, norms, [value.cpu().clone() for value in state.values()]


def on_ranks(run_ranks: Any, name: str, *args: Any, **kwargs: Any) -> list[Any]:
    world_size = WORLD_SIZES.get(name, 2)
    if world_size == 1:
        return [train(name, *args, **kwargs)]
    results: list[Any] = run_ranks(train, name, *args, world_size=world_size, **kwargs)
    return results


def assert_alike(results: list[Any], expected: Any) -> None:
    for losses, norms, _ in results:
        assert losses == pytest.approx(expected[0], abs=1e-5)
        assert norms == pytest.approx(expected[1], abs=1e-5)
    for weight, value in zip(results[0][2], expected[2], strict=True):
        torch.testing.assert_close(weight, value, rtol=0, atol=1e-5)


@pytest.mark.contract("training: strategies are saved and go on")
@pytest.mark.parametrize("name", EVERY)
def test_it_trains_as_one_process_and_goes_on_exactly_where_it_was_saved(run_ranks, tmp_path: Path, name):
    whole = on_ranks(run_ranks, name, tmp_path / "state", save_at=12)
    assert_alike(whole, train_by_hand(name))
    again = on_ranks(run_ranks, name, tmp_path / "state", seed=100, begin=12)
    assert_alike(again, train_by_hand(name, begin=12))
    assert again[0][0] == whole[0][0][12:]  # bit for bit


@slow
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_what_any_strategy_has_saved_another_goes_on_with(run_ranks, tmp_path: Path, number):
    saved, name = list(PLANS)[number], list(PLANS)[number - 1]
    on_ranks(run_ranks, saved, tmp_path, save_at=12)
    went_on = on_ranks(run_ranks, name, tmp_path, seed=100, begin=12)
    assert_alike(went_on, train_by_hand(name, begin=12))


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow) for name in PLANS if name != "one process"])
def test_an_error_on_one_rank_reaches_the_caller(run_ranks, name):
    def fail() -> None:
        accelerator, model, *_ = make(name, 0)
        if accelerator.is_last_process:
            raise KeyError("mine")
        model(torch.ones(2, WIDTH, device=accelerator.device)).sum().backward()
        accelerator.wait_for_everyone()

    with pytest.raises(KeyError, match="mine"):
        run_ranks(fail, world_size=WORLD_SIZES.get(name, 2))


def test_layouts_that_do_not_fit_or_are_not_supported_are_refused(run_ranks):
    for size in ("cp_size", "sp_size"):
        with pytest.raises(ConfigError, match=f"{size}=2 .*not supported"):
            ParallelismConfig(**{size: 2})
    with pytest.raises(ConfigError, match=r"4 ranks \(dp_replicate_size=2 .*dp_shard_size=2\)"):
        run_ranks(lambda: Accelerator(cpu=True, **PLANS["hsdp 2 x 2"]))


def test_ranks_know_their_place_in_the_layout(run_ranks):
    def places() -> Any:
        accelerator = Accelerator(cpu=True)
        mesh = accelerator.torch_device_mesh
        return (
            accelerator.data_parallel_rank,
            accelerator.data_parallel_shard_rank,
            mesh.mesh_dim_names,
            accelerator.parallelism_config.total_size,
            str(accelerator.distributed_type),
        )

    variables = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1",
        "ACCELERATE_USE_FSDP": "true",
    }
    for rank, found in enumerate(run_ranks(places, env=variables)):
        assert found == (rank, 0, ("dp_replicate", "dp_shard"), 2, "FSDP")
