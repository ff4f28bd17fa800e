"""What is saved with DeepSpeed is restored, published as a whole, and readable by DeepSpeed's own converter."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from fixtures.deepspeed_runs import epoch, make_loader, make_model, plugin
from safetensors.torch import load_file
from torch import nn

from nb_accelerate import Accelerator, DeepSpeedPlugin
from nb_accelerate.errors import CheckpointError, ConfigError


def prepared(stage, precision="no", **more):
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, deepspeed_plugin=None if stage is None else plugin(stage, **more)
    )
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    return accelerator, accelerator.prepare(model, optimizer, make_loader(shuffle=True), scheduler)


def copied(state):
    return {name: value.detach().clone() for name, value in state.items()}


def save_and_resume(folder, stage, precision):
    accelerator, things = prepared(stage, precision)
    accelerator.save_state(folder)
    epoch(accelerator, *things)
    accelerator.save_state(folder)  # in place of the first
    saved = copied(accelerator.get_state_dict(things[0]))
    accelerator.save_model(things[0], folder / "weights")
    expected = epoch(accelerator, *things).losses
    accelerator.free_memory()
    del things
    accelerator, things = prepared(stage, precision)
    epoch(accelerator, *things)
    epoch(accelerator, *things)  # somewhere else
    accelerator.load_state(folder)
    restored = copied(accelerator.get_state_dict(things[0]))
    return expected, epoch(accelerator, *things).losses, saved, restored


@pytest.mark.limit(100)
@pytest.mark.parametrize(("stage", "precision"), [(0, "no"), (1, "bf16"), (2, "no"), (3, "no"), (3, "bf16")])
def test_a_resumed_run_goes_on_exactly(run_ranks, tmp_path, stage, precision):
    folder = tmp_path / "state"
    expected, resumed, saved, restored = run_ranks(save_and_resume, folder, stage, precision, deadline=90)[0]
    assert resumed == expected
    assert all(torch.equal(saved[name], restored[name]) for name in saved)
    dtype = torch.float32 if precision == "no" else torch.bfloat16
    weights = load_file(folder / "weights" / "model.safetensors")
    assert {name: weight.shape for name, weight in weights.items()} == {
        name: weight.shape for name, weight in make_model().state_dict().items()
    }
    assert all(weights[name].dtype is dtype and torch.equal(weights[name], saved[name]) for name in saved)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    assert {name for name in manifest["files"] if name.startswith("pytorch_model/")}
    if stage:  # stage 0 has nothing to convert
        subprocess.run(
            [sys.executable, str(folder / "zero_to_fp32.py"), str(folder), str(tmp_path / "whole")],
            check=True,
            capture_output=True,
        )
        whole = torch.load(tmp_path / "whole" / "pytorch_model.bin", weights_only=True)
        assert all((whole[name] - saved[name].float()).abs().max() < 1e-2 for name in saved)


def refused(*attempts):
    """Return the message of each attempt to load a folder with a stage. Nothing is changed by it."""
    messages = []
    for folder, stage in attempts:
        accelerator, things = prepared(stage)
        before = copied(accelerator.get_state_dict(things[0]))
        with pytest.raises(CheckpointError) as caught:
            accelerator.load_state(folder)
        after = accelerator.get_state_dict(things[0])
        assert all(torch.equal(before[name], after[name]) for name in before)
        messages.append(str(caught.value))
    return messages


def load_into_another_model(folder):
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin(2))
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder, strict=False)
    return str(caught.value)


@pytest.mark.limit(120)
def test_checkpoints_that_do_not_fit_or_are_damaged_are_refused_and_change_nothing(run_ranks, tmp_path):
    folder, plain, damaged = tmp_path / "state", tmp_path / "plain", tmp_path / "damaged"

    def save():
        for path, stage in ((plain, None), (folder, 2)):
            accelerator, things = prepared(stage)
            epoch(accelerator, *things)
            accelerator.save_state(path)

    run_ranks(save)
    shutil.copytree(folder, damaged)
    share = next((damaged / "pytorch_model").glob("*rank_1*optim_states.pt"))
    content = bytearray(share.read_bytes())
    content[len(content) // 2] ^= 1
    share.write_bytes(content)
    messages = run_ranks(refused, (folder, None), (folder, 3), (plain, 2), (damaged, 2))[0]
    assert "zero_to_fp32.py" in messages[0]
    assert "saved with ZeRO stage 1 or 2, and this engine has stage 3" in messages[1]
    assert "was not saved by DeepSpeed" in messages[2]
    assert share.name in messages[3]
    shape = "0.weight is of shape (16, 6) in the checkpoint and (8, 6) here"
    assert shape in run_ranks(load_into_another_model, folder)[0]
    said = run_ranks(refused, (folder, 2), world_size=1)[0][0]
    assert "was saved by 2 ranks, and this run has 1" in said
    assert "deepspeed.checkpoint.ds_to_universal" in said


def save_where_one_cannot_write(folder):
    """Save three times: well, with a rank whose disk is full when it writes, and well again; what was said."""
    accelerator, things = prepared(2)
    accelerator.save_state(folder)
    before = {file.name: file.read_bytes() for file in (folder / "pytorch_model").iterdir()}
    accelerator.wait_for_everyone()
    epoch(accelerator, *things)
    save = things[0].checkpoint_engine.save

    def fail(state, path):
        raise OSError(28, "No space left on device", path)

    if accelerator.process_index == 1:
        things[0].checkpoint_engine.save = fail
    with pytest.raises(CheckpointError) as caught:
        accelerator.save_state(folder)
    after = {file.name: file.read_bytes() for file in (folder / "pytorch_model").iterdir()}
    accelerator.wait_for_everyone()
    things[0].checkpoint_engine.save = save
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    return before == after, str(caught.value)


def test_a_rank_that_cannot_write_is_told_and_nobody_waits(run_ranks, tmp_path):
    for is_as_before, said in run_ranks(save_where_one_cannot_write, tmp_path / "state"):
        assert is_as_before
        assert "No space left on device" in said
    assert (tmp_path / "state" / "latest").read_text() == "pytorch_model"


class Explosive:
    def __reduce__(self):
        return print, ("code of a checkpoint runs",)


def test_code_in_a_checkpoint_does_not_run(run_ranks, tmp_path, capfd):
    run_ranks(load_planted, tmp_path, world_size=1)
    assert "code of a checkpoint runs" not in capfd.readouterr().out


def load_planted(tmp_path):
    accelerator, things = prepared(1)
    accelerator.save_state(tmp_path / "state")
    (tmp_path / "state" / "checkpoint.json").unlink()  # as one of accelerate's, which has none
    for file in (tmp_path / "state").glob("random_states_*"):
        file.unlink()
    whole = tmp_path / "state" / "pytorch_model" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(whole, weights_only=False), "planted": Explosive()}, whole, pickle_module=pickle)
    with pytest.raises(CheckpointError, match="without running code"):
        accelerator.load_state(tmp_path / "state")
    with pytest.raises(ConfigError, match="async_save"):
        accelerator.save_state(tmp_path / "other", async_save=True)
    assert isinstance(accelerator.unwrap_model(things[0]), nn.Sequential)


def train_three_steps(folder, load, stage):
    """Train a small model from the state that DeepSpeed has converted, or two steps before it is saved."""
    config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 4}
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin({**config, "checkpoint": {"load_universal": load}})
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    rows = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    if load:
        model.load_checkpoint(str(folder), tag="pytorch_model_universal")
    losses = []
    for step in range(3 if load else 5):
        if step == 2 and not load:
            accelerator.save_state(folder)
        loss = (model(rows) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[-3:]


@pytest.mark.slow
@pytest.mark.limit(180)
def test_a_converted_state_goes_on_with_other_numbers_of_ranks(run_ranks, tmp_path):
    folder = tmp_path / "state"
    expected = run_ranks(train_three_steps, folder, False, 2, deadline=60)[0]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", folder / "pytorch_model", "--output_folder", folder / "pytorch_model_universal"]
    subprocess.run([*command, *folders], check=True, capture_output=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    for ranks in (1, 3):
        found = run_ranks(train_three_steps, folder, True, 2, world_size=ranks, deadline=60)[0]
        assert found == pytest.approx(expected, abs=1e-6)
