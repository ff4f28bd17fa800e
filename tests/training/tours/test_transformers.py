"""The quick tours' model of transformers: trained, saved and loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training.tours.stage import stage

TRANSFORMERS = """
from nb_accelerate import Accelerator
from transformers import AutoModelForSequenceClassification, BertConfig, get_scheduler
from torch.optim import AdamW
from tqdm.auto import tqdm

accelerator = Accelerator(cpu=True)

config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                    num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_config(config)
optimizer = AdamW(model.parameters(), lr=3e-3)
rows = [{"input_ids": torch.tensor([i % 30 + 1, 5, 9]), "labels": torch.tensor(i % 2)} for i in range(16)]
train_dataloader = torch.utils.data.DataLoader(rows, batch_size=4)
eval_dataloader = torch.utils.data.DataLoader(rows, batch_size=4)

train_dataloader, eval_dataloader, model, optimizer = accelerator.prepare(
    train_dataloader, eval_dataloader, model, optimizer
)

num_epochs = 3
num_training_steps = num_epochs * len(train_dataloader)
lr_scheduler = get_scheduler(
    "linear",
    optimizer=optimizer,
    num_warmup_steps=0,
    num_training_steps=num_training_steps
)

progress_bar = tqdm(range(num_training_steps), disable=not accelerator.is_local_main_process)

model.train()
for epoch in range(num_epochs):
    for batch in train_dataloader:
        outputs = model(**batch)
        loss = outputs.loss
        accelerator.backward(loss)

        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        progress_bar.update(1)

progress_bar.close()
done.append((num_training_steps, progress_bar.n, lr_scheduler.get_last_lr()))
"""

SAVE_PRETRAINED = """
from transformers import AutoModel

unwrapped_model = accelerator.unwrap_model(model)
unwrapped_model.save_pretrained(
    directory,
    is_main_process=accelerator.is_main_process,
    save_function=accelerator.save,
)
accelerator.wait_for_everyone()
model = AutoModel.from_pretrained(directory)
"""


@pytest.mark.slow
@pytest.mark.limit(180)
@pytest.mark.may_leave("threads")
def test_a_model_of_transformers_is_trained_saved_and_loaded(run_ranks, tmp_path):
    def run(directory: str) -> Any:
        names = stage() | {"directory": directory}
        exec(TRANSFORMERS, names)
        trained = names["accelerator"].unwrap_model(names["model"]).state_dict()
        exec(SAVE_PRETRAINED, names)
        loaded = names["model"].state_dict()
        same = all(
            torch.equal(value, trained[f"bert.{name}"]) for name, value in loaded.items() if "pooler" not in name
        )
        return names["done"], same

    first, second = run_ranks(run, str(tmp_path), deadline=150.0)
    assert first[1]
    assert second[1]
    assert first[0] == [(6, 6, [0.0])]
    assert second[0][0][0] == 6
