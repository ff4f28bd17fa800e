"""Linear layers that compute in 8-bit numbers, by torchao, on the CPU: with each strategy, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nb_accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.process import context
from nb_accelerate.utils import AORecipeKwargs, TorchTensorParallelConfig

ROWS = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
CHOSEN = ("2", "4")
OPTIONS: dict[str, Any] = {
    "ddp": {},
    "fsdp": {"fsdp_plugin": FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap", min_num_params=500)},
    "tp": {
        "parallelism_config": ParallelismConfig(
            tp_size=2, tp_handler=TorchTensorParallelConfig(plan={"2": "colwise", "4": "rowwise"})
        )
    },
}
TOLERANCE = {"ddp": 1e-6, "fsdp": 2e-3, "tp": 2e-3}  # FSDP gathers weights in bfloat16; parts have scales of their own


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 16)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int = 6) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = (model(ROWS) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_by_hand() -> list[float]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model, optimizer = make()
    config = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in CHOSEN, config=config)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(ROWS)
        loss = (outputs.float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def names_in_8_bits(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, layer in model.named_modules() if "Float8Linear" in type(layer).__name__)


@pytest.mark.limit(120)
@pytest.mark.parametrize("strategy", OPTIONS)
def test_losses_are_those_of_torchao_by_hand_and_checkpoints_go_on_exactly(run_ranks, tmp_path: Path, strategy):
    def run() -> Any:
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", **OPTIONS[strategy])
        model, optimizer = accelerator.prepare(*make())
        losses = train(accelerator, model, optimizer)
        accelerator.save_state(tmp_path / "state")
        expected = train(accelerator, model, optimizer)
        accelerator.load_state(tmp_path / "state")
        resumed = train(accelerator, model, optimizer)
        state = accelerator.get_state_dict(model)  # on rank 0
        kinds = {name: (type(one), one.dtype) for name, one in state.items()}
        chosen = names_in_8_bits(accelerator.unwrap_model(model))
        return losses, expected == resumed, kinds, chosen, accelerator.fp8_backend

    by_hand = train_by_hand()
    assert by_hand[-1] < by_hand[0]
    results = run_ranks(run, deadline=100)
    for losses, is_exact, _, chosen, backend in results:
        assert losses == pytest.approx(by_hand, abs=TOLERANCE[strategy])
        assert is_exact
        assert (chosen, backend) == (CHOSEN, "AO")
    assert results[0][2] == dict.fromkeys(make()[0].state_dict(), (torch.Tensor, torch.float32))


def test_the_recipe_chooses_layers_and_a_model_without_any_is_a_warning(caplog: pytest.LogCaptureFixture):
    small = nn.Sequential(nn.Linear(16, 15), nn.Linear(15, 16), nn.Linear(16, 1))
    context.reset()
    Accelerator(cpu=True, mixed_precision="fp8").prepare(small)
    assert "Sequential computes in 8 bits" in caplog.text
    context.reset()
    recipe = AORecipeKwargs(module_filter_func=lambda layer, name: name == "0")
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    model = accelerator.prepare(make()[0])
    assert names_in_8_bits(model) == ("0",)
    assert names_in_8_bits(accelerator.prepare(model)) == ("0",)


def test_deepspeed_refuses_8_bits(run_ranks):
    def run() -> None:
        Accelerator(cpu=True, mixed_precision="fp8", deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))

    with pytest.raises(ConfigError, match=r"fp8.*Write mixed_precision='bf16'"):
        run_ranks(run)
