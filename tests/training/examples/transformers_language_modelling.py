"""Train a language model of transformers as its scripts without a Trainer do, and report its perplexity."""

import math
import os
from typing import ClassVar

import torch
from accelerate import Accelerator, DistributedType
from accelerate.logging import get_logger
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from training.examples.data import VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM, SchedulerType, default_data_collator, get_scheduler

logger = get_logger(__name__)
BLOCK_SIZE = 8


class ListTracker(GeneralTracker):
    name = "list"
    requires_logging_directory = False
    entries: ClassVar[list] = []

    @on_main_process
    def __init__(self):
        super().__init__()
        ListTracker.entries = []

    @property
    def tracker(self):
        return self.entries

    @on_main_process
    def store_init_configuration(self, values):
        self.entries.append(values)

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.entries.append((step, values))


def group_texts(words):
    total_length = (len(words) // BLOCK_SIZE) * BLOCK_SIZE
    blocks = [words[start : start + BLOCK_SIZE] for start in range(0, total_length, BLOCK_SIZE)]
    return [{"input_ids": block, "labels": list(block)} for block in blocks]


def main(folder):
    per_device_batch_size, num_train_epochs, gradient_accumulation_steps, with_tracking = 2, 2, 2, True
    accelerator_log_kwargs = {}
    if with_tracking:
        from accelerate.state import PartialState

        PartialState(cpu=True)  # before the tracker asks which process is the main one
        accelerator_log_kwargs["log_with"] = ListTracker()
        accelerator_log_kwargs["project_dir"] = folder
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=gradient_accumulation_steps, **accelerator_log_kwargs
    )
    logger.info(accelerator.state, main_process_only=False)
    set_seed(53)
    if accelerator.is_main_process:
        os.makedirs(folder, exist_ok=True)
    accelerator.wait_for_everyone()
    config = AutoConfig.for_model("gpt2", vocab_size=VOCABULARY, n_positions=BLOCK_SIZE, n_embd=16, n_layer=1, n_head=2)
    model = AutoModelForCausalLM.from_config(config)
    with accelerator.main_process_first():
        train_dataset = group_texts([(7 * place + place // 5) % VOCABULARY for place in range(130)])
        eval_dataset = group_texts([(5 * place + 3) % VOCABULARY for place in range(64)])
    train_dataloader = DataLoader(
        train_dataset,
        shuffle=True,
        generator=torch.Generator().manual_seed(2),
        collate_fn=default_data_collator,
        batch_size=per_device_batch_size,
    )
    eval_dataloader = DataLoader(eval_dataset, collate_fn=default_data_collator, batch_size=per_device_batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / gradient_accumulation_steps)
    max_train_steps = num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = get_scheduler(
        name=SchedulerType.COSINE,
        optimizer=optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=max_train_steps * accelerator.num_processes,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    if accelerator.distributed_type == DistributedType.XLA:
        model.tie_weights()
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / gradient_accumulation_steps)
    max_train_steps = num_train_epochs * num_update_steps_per_epoch
    if with_tracking:
        experiment_config = {"lr_scheduler_type": SchedulerType.COSINE.value, "max_train_steps": max_train_steps}
        accelerator.init_trackers("clm_no_trainer", experiment_config)
    progress_bar = tqdm(range(max_train_steps), disable=True)
    report = []
    completed_steps = 0
    for epoch in range(num_train_epochs):
        model.train()
        total_loss = 0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress_bar.update(1)
                completed_steps += 1
            report.append((accelerator.gather(loss.detach()).tolist(), lr_scheduler.get_last_lr()))
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(per_device_batch_size)))
        eval_loss = torch.mean(torch.cat(losses))
        perplexity = math.exp(eval_loss)
        report.append(perplexity)
        if with_tracking:
            accelerator.log(
                {
                    "perplexity": perplexity,
                    "eval_loss": eval_loss.item(),
                    "train_loss": total_loss.item() / len(train_dataloader),
                    "epoch": epoch,
                },
                step=completed_steps,
            )
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    report.append(ListTracker.entries if accelerator.is_main_process else None)
    accelerator.end_training()
    return report
