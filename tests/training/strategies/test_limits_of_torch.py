"""What torch cannot do with shards works another way, or is refused in a sentence that says what to write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nb_accelerate import Accelerator, FullyShardedDataParallelPlugin
from nb_accelerate.base.config.parallelism import ParallelismConfig, TorchTensorParallelConfig
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.strategies.deepspeed.resolve import optimizer_of

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks

ROWS = torch.linspace(-2, 2, 8 * 3 * 4).sin().reshape(8, 3, 4)


class Attention(nn.Module):
    """A model with a scalar, and with an attention that reads the weights of a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.attention(rows, rows, rows)[0]) * self.scale


def linear_layers(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    del nonwrapped_numel
    return recurse or isinstance(module, nn.Linear)


def train(plugin: FullyShardedDataParallelPlugin | None) -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(ROWS), batch_size=4 // accelerator.num_processes)
    )
    for _ in range(3):
        for (rows,) in loader:
            accelerator.backward(model(rows).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return list(accelerator.get_state_dict(model).values())


@pytest.mark.slow
def test_scalars_and_attentions_whose_parts_a_policy_wraps_train_as_in_one_process(run_ranks: RunRanks):
    expected = train(None)
    for options in ({"auto_wrap_policy": linear_layers}, {"min_num_params": 8}, {"auto_wrap_policy": "no_wrap"}):
        weights, _ = run_ranks(train, FullyShardedDataParallelPlugin(**options))
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_gradients_of_gradients_are_refused_with_what_to_write(run_ranks: RunRanks):
    def refused() -> list[str]:
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        model = accelerator.prepare(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))
        rows = torch.ones(2, 3, requires_grad=True)
        with pytest.raises(ConfigError) as caught:
            accelerator.backward(model(rows).sum(), create_graph=True)
        (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
        with pytest.raises(ConfigError) as penalty:
            accelerator.backward(slope.square().sum())
        return [str(caught.value), str(penalty.value)]

    for backward, penalty in run_ranks(refused):
        assert backward == penalty
        assert backward.endswith("train with DDP.")


@pytest.mark.slow
def test_loops_over_many_parameters_are_set_back_where_only_some_are_parallelized(run_ranks: RunRanks):
    def make(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, **options)

    def parallel() -> list[list[float]]:
        config = ParallelismConfig(
            tp_size=2, tp_handler=TorchTensorParallelConfig(plan={"0": "colwise", "2": "rowwise"})
        )
        accelerator = Accelerator(cpu=True, parallelism_config=config)
        found = []
        for options in ({"foreach": True}, {"fused": True}, {"foreach": None}):
            model, optimizer = accelerator.prepare(*make(**options))
            for _ in range(2):
                accelerator.backward(model(ROWS[0]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            found.append(accelerator.unwrap_model(model)[3].weight.tolist())
        return found

    model, optimizer = make()
    for _ in range(2):
        model(ROWS[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(parallel):
        for weights in found:
            assert weights == pytest.approx(model[3].weight.tolist(), abs=1e-6)


def test_a_state_that_a_constructor_makes_is_no_step():
    model = nn.Linear(2, 1)
    fresh = torch.optim.Adagrad(model.parameters())
    assert fresh.state
    assert optimizer_of(model, [fresh]) is fresh
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for optimizer in (fresh, momentum):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with pytest.raises(ConfigError, match="loaded before prepare"):
            optimizer_of(model, [optimizer])
