"""What a rank holds of a model that it trains, beside the arithmetic: parameters + gradients + optimizer state."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin
from nb_accelerate.base.config.kwargs import DistributedDataParallelKwargs
from nb_accelerate.base.config.parallelism import ParallelismConfig, TorchTensorParallelConfig
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.process import context

WIDTH, BLOCKS = 256, 6
FLOATS = BLOCKS * 2 * WIDTH * WIDTH
WHOLE = 4 * FLOATS * 4
"""Bytes of parameters, gradients and the two moments of Adam, all in float32."""

PLAN = TorchTensorParallelConfig(plan={"*.0": "colwise", "*.1": "rowwise"})
SETUPS: dict[str, tuple[dict[str, Any], int]] = {  # options, and over how many ranks a model is divided
    "ddp, 1": ({}, 1),
    "ddp, 2": ({"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]}, 1),
    "fsdp, 1": ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, 1),
    "fsdp, 2": ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, 2),
    "fsdp, 4": ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, 4),
    "tensor parallel, 2": ({"parallelism_config": ParallelismConfig(tp_size=2, tp_handler=PLAN)}, 2),
    "fsdp x tensor parallel, 4": (
        {"parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2, tp_handler=PLAN)},
        4,
    ),
}


def bytes_of_live_tensors() -> int:
    """Bytes of memory behind all tensors that Python can reach, each counted once, without those of no memory."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor):
            part: Any = one.to_local() if hasattr(one, "to_local") else one
            for tensor in (part, part.grad if part.is_leaf else None):
                if tensor is not None and not tensor.is_meta:
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
            if one.is_leaf and hasattr(one.grad, "to_local"):
                storage = one.grad.to_local().untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def held_after_a_step(name: str) -> int:
    context.reset()
    accelerator = Accelerator(cpu=True, **SETUPS[name][0])
    before = bytes_of_live_tensors()
    model: nn.Module = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(BLOCKS)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(2, WIDTH)).square().mean())
        optimizer.step()
    return bytes_of_live_tensors() - before


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_a_rank_holds_its_part_of_parameters_gradients_and_optimizer_and_no_more(run_ranks, name):
    world_size = int(name.rpartition(" ")[2])
    held = [held_after_a_step(name)] if world_size == 1 else run_ranks(held_after_a_step, name, world_size=world_size)
    assert held == [pytest.approx(WHOLE / SETUPS[name][1], rel=0.1)] * world_size
