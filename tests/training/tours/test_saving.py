"""The quick tours' blocks about saving and loading."""

from __future__ import annotations

from pathlib import Path

import pytest
from training.tours.stage import START, play

BEGIN = (
    START
    + """
import os

model, optimizer = accelerator.prepare(model, optimizer)
device = accelerator.device

def set_to(number):
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(number)
set_to(7.0)
"""
)

SAVE = """
accelerator.wait_for_everyone()
accelerator.save_model(model, save_directory)
"""

LOAD = """
accelerator.wait_for_everyone()
accelerator.save_model(model, save_directory, safe_serialization=False)
accelerator.wait_for_everyone()
set_to(0.0)
unwrapped_model = accelerator.unwrap_model(model)
path_to_checkpoint = os.path.join(save_directory,"pytorch_model.bin")
unwrapped_model.load_state_dict(torch.load(path_to_checkpoint))
"""

SHARDED = """
accelerator.wait_for_everyone()
accelerator.save_model(model, save_directory, max_shard_size="1GB", safe_serialization=True)
"""

LOAD_SHARDED = """
from nb_accelerate.utils import load_checkpoint_in_model

unwrapped_model = accelerator.unwrap_model(model)
accelerator.wait_for_everyone()
set_to(0.0)
load_checkpoint_in_model(unwrapped_model, save_directory, device_map={"":device})
"""

STATES = """
from nb_accelerate import Accelerator
from nb_accelerate.utils import ProjectConfiguration

accelerator = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration(project_dir=save_directory, automatic_checkpoint_naming=True),
)
model, optimizer, train_dataloader, scheduler = accelerator.prepare(model, optimizer, train_dataloader, scheduler)
accelerator.register_for_checkpointing(lr_scheduler)

for _ in range(2):
    for inputs, targets in train_dataloader:
        optimizer.zero_grad()
        accelerator.backward(loss_function(model(inputs), targets))
        optimizer.step()
        scheduler.step()
    accelerator.save_state()
saved = [weight.item() for weight in model.parameters()]

with torch.no_grad():
    for weight in model.parameters():
        weight.zero_()
accelerator.load_state()
done.append(saved == [weight.item() for weight in model.parameters()])
done.append(accelerator.save_iteration)
"""


def test_a_model_is_saved_whole_in_pieces_and_loaded(run_ranks, tmp_path: Path):
    where = f"save_directory = {str(tmp_path / 'model')!r}"
    for found in run_ranks(play, where, BEGIN, SAVE, LOAD):
        assert found["weights"] == [7.0, 7.0]
    for found in run_ranks(play, where, BEGIN, SHARDED, LOAD_SHARDED):
        assert found["weights"] == [7.0, 7.0]


@pytest.mark.contract("checkpoints: a whole state")
def test_a_whole_state_is_saved_and_loaded(run_ranks, tmp_path: Path):
    for found in run_ranks(play, f"save_directory = {str(tmp_path)!r}", STATES):
        assert found["done"] == [True, 2]
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert names == [
        f"checkpoints/checkpoint_{number}/{name}"
        for number in (0, 1)
        for name in (
            "checkpoint.json",
            "custom_checkpoint_0.pkl",
            "model.safetensors",
            "optimizer.bin",
            "random_states_0.pkl",
            "random_states_1.pkl",
            "scheduler.bin",
        )
    ]
