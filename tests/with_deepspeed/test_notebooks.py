"""DeepSpeed in cells of a notebook, in plain scripts, and transformers' own way to it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fixtures.kernels import Kernel

MAKE = """
import torch
from nb_accelerate import Accelerator, DeepSpeedPlugin

def prepared(stage):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    model = torch.nn.Linear(4, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

def steps(accelerator, model, optimizer, count=3):
    losses = []
    for _ in range(count):
        loss = model(torch.ones(2, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 5))
    return losses
"""


@pytest.mark.limit(120)
def test_engines_live_in_the_cells_of_a_notebook(kernel: Kernel):
    kernel.run("%load_ext nb_accelerate").ok()
    kernel.run(f"%%distributed -n 2\n{MAKE}\nthings = prepared(3)\nprint(steps(*things))").ok()
    second = kernel.run("%%distributed\nprint(steps(*things))").ok()
    assert second.stdout.count("[") == 1  # both ranks print the same, which is shown once
    other = kernel.run(
        "%%distributed\nthings = prepared(2)\nfirst, second = steps(*things), steps(*things)\nprint(second)"
    )
    assert other.ok().stdout == second.stdout


@pytest.mark.limit(90)
def test_a_plain_script_trains_on_one_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{MAKE}\nlosses = steps(*prepared(2))\nassert losses[-1] < losses[0]\nprint('trained')")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=80, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")


def model_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel._from_config(GPT2Config(**small, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))


@pytest.mark.limit(90)
def test_models_of_transformers_are_sharded_from_the_first(run_ranks):
    def train():
        import torch

        from nb_accelerate import Accelerator, DeepSpeedPlugin

        zero = {"stage": 3, "stage3_param_persistence_threshold": "auto", "reduce_bucket_size": "auto"}
        engine = DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero})
        accelerator = Accelerator(cpu=True, deepspeed_plugin=engine)
        model = model_of_transformers()
        sharded = all(parameter.numel() == 0 for parameter in model.parameters())
        with engine.zero3_init_context_manager(enable=False):
            whole = model_of_transformers()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        ids = torch.arange(8).repeat(2, 1)
        losses = []
        for _ in range(4):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state = accelerator.get_state_dict(model)
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        expected = {name: tuple(value.shape) for name, value in whole.state_dict().items()}
        return sharded, losses, not shapes or shapes == expected

    for sharded, losses, has_shapes in run_ranks(train, deadline=80):
        assert sharded
        assert has_shapes
        assert losses[-1] < losses[0]


@pytest.mark.limit(120)
def test_the_trainer_of_transformers_brings_its_own_way_to_deepspeed(run_ranks, tmp_path):
    def train():
        import os

        os.environ["ACCELERATE_USE_CPU"] = "false"  # where CPUs are asked for, accelerate leaves DeepSpeed out
        import deepspeed.ops
        import torch
        from transformers import Trainer, TrainingArguments

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for 40 seconds otherwise
        rows = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(16)]
        config = {
            "zero_optimization": {"stage": 2},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_allow_untested_optimizer": True,
        }
        arguments = TrainingArguments(
            str(tmp_path), deepspeed=config, max_steps=3, report_to=[], disable_tqdm=True, save_strategy="no"
        )
        trainer = Trainer(model=model_of_transformers(), args=arguments, train_dataset=rows)
        done = trainer.train()
        return type(trainer.model_wrapped).__name__, done.global_step

    assert run_ranks(train, deadline=100, env={"DS_ACCELERATOR": "cpu"}) == [("DeepSpeedEngine", 3)] * 2
