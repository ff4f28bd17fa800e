"""The functions of accelerate that save and load FSDP by hand: here, and between here and accelerate itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.process import context
from nb_accelerate.utils import (
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)

if TYPE_CHECKING:
    from pathlib import Path


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def prepared(seed: int, kind: str) -> tuple[Any, ...]:
    context.reset()
    options = Plugin(state_dict_type=kind, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=options)
    model = make_model(seed)
    return (accelerator, options, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1)))


def step(accelerator: Any, model: Any, optimizer: Any) -> float:
    loss = model(torch.ones(2, 4)).square().sum()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def losses_after_loading(folder: Path) -> list[list[float]]:
    """Save in every way and train on, then load into another model and train it on: the losses of both."""
    found = []
    for kind, use_dcp in (("SHARDED_STATE_DICT", True), ("SHARDED_STATE_DICT", False), ("FULL_STATE_DICT", True)):
        place = folder / f"{kind}-{use_dcp}"
        accelerator, options, model, optimizer = prepared(0, kind)
        step(accelerator, model, optimizer)
        save_fsdp_model(options, accelerator, model, place, use_dcp=use_dcp)
        save_fsdp_optimizer(options, accelerator, optimizer, model, place, use_dcp=use_dcp)
        expected = [step(accelerator, model, optimizer) for _ in range(3)]
        accelerator, options, model, optimizer = prepared(1, kind)
        load_fsdp_model(options, accelerator, model, place, use_dcp=use_dcp)
        load_fsdp_optimizer(options, accelerator, optimizer, model, place, use_dcp=use_dcp)
        found += [expected, [step(accelerator, model, optimizer) for _ in range(3)]]
    merge_fsdp_weights(
        folder / "SHARDED_STATE_DICT-True" / "pytorch_model_fsdp_0", folder / "merged", remove_checkpoint_dir=True
    )
    with pytest.raises(CheckpointError, match=r"pytorch_model_fsdp_0 is not there.* has pytorch_model_fsdp_0_rank0"):
        load_fsdp_model(Plugin(), accelerator, model, folder / "SHARDED_STATE_DICT-False")
    return found


def test_what_is_saved_by_hand_in_any_way_is_restored(run_ranks, tmp_path: Path):
    for found in run_ranks(losses_after_loading, tmp_path):
        for expected, resumed in zip(found[::2], found[1::2], strict=True):
            assert resumed == pytest.approx(expected, abs=1e-6)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {
        "FULL_STATE_DICT-True/optimizer.bin", "FULL_STATE_DICT-True/pytorch_model_fsdp.bin", "merged/model.safetensors",
        *(f"SHARDED_STATE_DICT-True/optimizer_0/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")),
        *(f"SHARDED_STATE_DICT-False/{part}_0_rank{rank}.bin"
          for part in ("optimizer", "pytorch_model_fsdp") for rank in (0, 1)),
    }  # fmt: skip
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == make_model(0).state_dict().keys()


def between_here_and_accelerate(folder: Path) -> dict[str, bool]:
    """Save here and load with accelerate's own functions, and the other way round; whether weights and states agree."""
    import accelerate
    from accelerate.utils import fsdp_utils as theirs
    from torch.distributed.fsdp import fully_shard

    agree = {}
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        accelerator, options, model, optimizer = prepared(0, kind)
        step(accelerator, model, optimizer)
        save_fsdp_model(options, accelerator, model, folder / kind)
        save_fsdp_optimizer(options, accelerator, optimizer, model, folder / kind)
        other = fully_shard(make_model(1))
        its_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
        their_options = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        their_accelerator = accelerate.Accelerator(cpu=True)
        their_accelerator.state.fsdp_plugin = their_options  # which it leaves out on CPUs
        their_accelerator.state.distributed_type = accelerate.DistributedType.FSDP
        theirs.load_fsdp_model(their_options, their_accelerator, other, folder / kind)
        theirs.load_fsdp_optimizer(their_options, their_accelerator, its_optimizer, other, folder / kind)
        agree[f"{kind}, read by accelerate"] = same(model, optimizer.optimizer, other, its_optimizer)

        theirs.save_fsdp_model(their_options, their_accelerator, other, folder / f"{kind} of accelerate")
        theirs.save_fsdp_optimizer(
            their_options, their_accelerator, its_optimizer, other, folder / f"{kind} of accelerate"
        )
        accelerator, options, model, optimizer = prepared(2, kind)
        load_fsdp_model(options, accelerator, model, folder / f"{kind} of accelerate")
        load_fsdp_optimizer(options, accelerator, optimizer, model, folder / f"{kind} of accelerate")
        agree[f"{kind}, of accelerate"] = same(model, optimizer.optimizer, other, its_optimizer)
    return agree


def same(model: Any, optimizer: Any, other: Any, its_optimizer: Any) -> bool:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        state, its_state = optimizer.state[one], its_optimizer.state[two]
        pairs = [(one, two), *((state[name], its_state[name]) for name in ("exp_avg", "exp_avg_sq"))]
        if state["step"] != its_state["step"] or not all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs):
            return False
    return True


@pytest.mark.slow
def test_accelerate_reads_what_is_saved_here_and_the_other_way_round(run_ranks, tmp_path: Path):
    pytest.importorskip("accelerate")
    for agree in run_ranks(between_here_and_accelerate, tmp_path):
        assert all(agree.values()), agree
        assert len(agree) == 4
