"""Checkpoints that are written while training goes on: copies from a device arrive later than they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from fixtures.ranks import RunRanks

pytestmark = pytest.mark.usefixtures("simgpu")


def _save_and_load(folder: str, sharded: bool) -> tuple[bool, bool]:
    import torch

    from nb_accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin() if sharded else None)
    model = torch.nn.Linear(64, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 64, device=accelerator.device)).sum())
    optimizer.step()

    def tensors() -> list[torch.Tensor]:
        values = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
        return [value.to_local() if sharded else value for value in values]

    before = [tensor.detach().cpu() for tensor in tensors()]
    handle = accelerator.save_state(folder, async_save=True)
    with torch.no_grad():
        for tensor in tensors():
            tensor.zero_()
    handle.wait()
    accelerator.load_state(folder)
    loaded = [tensor.detach().cpu() for tensor in tensors()]
    return all(map(torch.equal, before, loaded)), all(tensor.isfinite().all().item() for tensor in loaded)


@pytest.mark.parametrize(("world_size", "sharded"), [(1, False), (2, False), (2, True)])
def test_a_background_save_holds_what_was_on_the_device_when_it_was_asked_for(
    run_ranks: RunRanks, tmp_path: Path, world_size: int, sharded: bool
) -> None:
    saved = run_ranks(_save_and_load, str(tmp_path / "saved"), sharded, world_size=world_size)
    assert saved == [(True, True)] * world_size
