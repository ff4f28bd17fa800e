"""transformers in launched functions: a Trainer with ``fsdp=`` and its own accelerate, and a script without a Trainer.

accelerate leaves FSDP out on CPUs, and trains with DistributedDataParallel there: what is shown is that the Trainer
runs, saves and goes on between our ranks. The script has our import, and its model is sharded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

ROWS = 16


def make_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    nothing = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**small, **nothing, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    return GPT2LMHeadModel._from_config(config)


def make_rows() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(ROWS)]


def train_with_trainer(folder: Path) -> Any:
    """Train, and once more from a checkpoint in the middle; what was used, and the losses of both."""
    from transformers import Trainer, TrainingArguments

    def make() -> Trainer:
        arguments = TrainingArguments(
            str(folder),
            use_cpu=True,
            fsdp=True,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
            max_steps=4,
            save_steps=2,
            logging_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            disable_tqdm=True,
            seed=3,
        )
        return Trainer(model=make_model(), args=arguments, train_dataset=make_rows())

    first = make()
    first.train()
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    again = make()
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    resumed = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
    return type(first.accelerator).__module__.partition(".")[0], losses, resumed


@pytest.mark.slow
@pytest.mark.limit(200)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
def test_a_trainer_with_fsdp_and_its_own_accelerate_trains_and_goes_on_from_its_checkpoint(run_ranks, tmp_path: Path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    for package, losses, resumed in run_ranks(train_with_trainer, tmp_path, deadline=90):
        assert package == "accelerate"
        assert len(losses) == 4
        assert resumed == pytest.approx(losses, abs=1e-4)


def train_without_trainer(sharded: bool) -> list[float]:
    """What a script without a Trainer does, with ``from nb_accelerate import Accelerator``."""
    from torch.utils.data import DataLoader
    from transformers import default_data_collator, get_scheduler

    from nb_accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin() if sharded else None)
    model = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(make_rows(), batch_size=2, collate_fn=default_data_collator)  # type: ignore[arg-type]
    scheduler: Any = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=16)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach().repeat(2)).mean().item())
    return losses


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.may_leave("files")
def test_a_script_without_a_trainer_learns_the_same_sharded_or_not(run_ranks):
    pytest.importorskip("transformers")
    whole, sharded = (run_ranks(train_without_trainer, shards)[0] for shards in (False, True))
    assert sharded == pytest.approx(whole, abs=1e-5)
    assert whole[-1] < whole[0]
