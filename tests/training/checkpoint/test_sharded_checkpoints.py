"""Checkpoints of which every rank writes a part: loaded on any number of ranks, sharded or not, and by accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.block_models import Block
from torch import nn

from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.checkpoint.sharded import merge_weights
from nb_accelerate.training.process import context

ROWS = 8


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(8, 1)  # of one row: nothing of it is on rank 1
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(x)) * self.scale


def prepare(sharded: bool, seed: int = 0, **options: Any) -> tuple[Any, Any, Any]:
    context.reset()
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(**options) if sharded else None)
    model: Any = Model(seed)
    groups = [{"params": [*model.last.parameters()], "lr": 0.02}, {"params": [*model.blocks.parameters()]}]
    return (accelerator, *accelerator.prepare(model, torch.optim.AdamW(groups, lr=0.01)))


def train(accelerator: Any, model: Any, optimizer: Any, begin: int, steps: int = 3) -> list[float]:
    losses = []
    for step in range(begin, begin + steps):
        rows = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
        mine = rows.chunk(accelerator.num_processes)[accelerator.process_index].to(accelerator.device)
        loss = (model(mine) - mine.sum(1, keepdim=True).sin()).square().mean()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def go_on(folder: Path, sharded: bool) -> list[float]:
    prepared = prepare(sharded, seed=7)
    prepared[0].load_state(folder)
    return train(*prepared, begin=3)


def save(parent: Path) -> Any:
    prepared = prepare(True)
    train(*prepared, begin=0)
    prepared[0].save_state(parent / "at once")
    handle = prepared[0].save_state(parent / "in the background", async_save=True)
    losses = train(*prepared, begin=3)
    handle.wait()
    weights = prepared[0].get_state_dict(prepared[1])
    return losses, {name: value.cpu().clone() for name, value in weights.items()}


@pytest.fixture
def saved(run_ranks, tmp_path: Path) -> list[float]:
    """The losses after a checkpoint of two ranks in ``tmp_path``."""
    results = run_ranks(save, tmp_path)
    return results[0][0]


SHARDS = {"__0_0.distcp", "__1_0.distcp", ".metadata"}


@pytest.mark.contract("checkpoints: shards")
def test_what_two_ranks_have_saved_goes_on_anywhere(saved, run_ranks, tmp_path: Path):
    expected = pytest.approx(saved, abs=1e-6)
    for folder in (tmp_path / "at once", tmp_path / "in the background"):
        names = {file.name for file in folder.iterdir()}
        assert names == {
            "checkpoint.json", "optimizer_0", "pytorch_model_fsdp_0", "random_states_0.pkl", "random_states_1.pkl",
        }  # fmt: skip
        for part in ("optimizer_0", "pytorch_model_fsdp_0"):
            assert {file.name for file in (folder / part).iterdir()} == SHARDS

    def go_on_in_both_ways() -> Any:
        return [go_on(tmp_path / "at once", True), go_on(tmp_path / "in the background", False)]

    for ours in run_ranks(go_on_in_both_ways):
        assert ours == [expected, expected]
    assert go_on(tmp_path / "at once", False) == expected  # one process
    merged = merge_weights(tmp_path / "at once" / "pytorch_model_fsdp_0", tmp_path / "merged")
    from safetensors.torch import load_file

    assert load_file(merged).keys() == Model().state_dict().keys()


@pytest.mark.slow
def test_what_two_ranks_have_saved_goes_on_on_four_and_what_four_have_saved_on_two(saved, run_ranks, tmp_path: Path):
    for ours in run_ranks(go_on, tmp_path / "at once", True, world_size=4):
        assert ours == pytest.approx(saved, abs=1e-6)
    of_four = run_ranks(save, tmp_path, world_size=4)[0][0]
    for ours in run_ranks(go_on, tmp_path / "at once", True):
        assert ours == pytest.approx(of_four, abs=1e-6)


@pytest.mark.slow
def test_a_checkpoint_takes_the_place_of_one_of_the_other_kind_as_a_whole(run_ranks, tmp_path: Path):
    def save_twice() -> Any:
        accelerator, model, optimizer = prepare(True)
        found = []
        for folder in (tmp_path / "clean", tmp_path / "beside a file"):
            for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "SHARDED_STATE_DICT"):
                accelerator.state.fsdp_plugin.set_state_dict_type(kind)
                train(accelerator, model, optimizer, 0, 1)
                accelerator.save_state(folder)
                accelerator.load_state(folder)
                found.append(sorted(file.name for file in folder.iterdir()))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    (tmp_path / "beside a file" / "mine.txt").parent.mkdir(exist_ok=True)
                    (tmp_path / "beside a file" / "mine.txt").touch()
                accelerator.wait_for_everyone()
        return found

    states = ["random_states_0.pkl", "random_states_1.pkl"]
    shards = ["checkpoint.json", "optimizer_0", "pytorch_model_fsdp_0", *states]
    whole = ["checkpoint.json", "model.safetensors", "optimizer.bin", *states]
    clean, beside = [shards, whole, shards], [[names[0], "mine.txt", *names[1:]] for names in (shards, whole, shards)]
    for found in run_ranks(save_twice):
        assert found[:3] == clean
        assert [sorted(names) for names in found[3:]] == [sorted(names) for names in beside]


def test_shards_that_were_damaged_are_named_and_nothing_is_loaded(saved, tmp_path: Path):
    del saved
    file = tmp_path / "at once" / "optimizer_0" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    accelerator, model, _ = prepare(False, seed=7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"optimizer_0/__1_0\.distcp"):
        accelerator.load_state(tmp_path / "at once")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"optimizer_0/__1_0\.distcp is missing"):
        accelerator.load_state(tmp_path / "at once")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    context.reset()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(nn.Linear(8, 1), None)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    del optimizer
    with pytest.raises(CheckpointError, match=r"pytorch_model_fsdp_0|optimizer of other parameters"):
        accelerator.load_state(tmp_path / "in the background")


def write_as_accelerate(folder: Path, kind: str) -> None:
    """Save with torch, in the files and forms of accelerate 1.15."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    _, model, prepared = prepare(False)
    train(Accelerator(), model, prepared, 0)
    inner = prepared.optimizer
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, inner)
    if kind == "shards":
        dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
        dcp.save({"optimizer": state}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    else:
        folder.mkdir()
        torch.save(weights, folder / "pytorch_model_fsdp.bin")
        torch.save(state, folder / "optimizer.bin")


@pytest.mark.parametrize("kind", ["shards", "whole"])
def test_checkpoints_of_fsdp_in_accelerate_are_loaded(tmp_path: Path, kind):
    write_as_accelerate(tmp_path / "theirs", kind)
    prepared = prepare(False)
    expected = train(*prepared, begin=0, steps=6)[3:]
    assert go_on(tmp_path / "theirs", False) == pytest.approx(expected, abs=1e-6)
