"""Train a classifier of transformers as its scripts without a Trainer do, with checkpoints and a resume."""

import json
import logging
import math
import os

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from training.examples.data import VOCABULARY, Accuracy, Sentences, padded
from transformers import AutoConfig, AutoModelForSequenceClassification, get_scheduler

logger = get_logger(__name__)


def train(folder, resume_from_checkpoint=None):
    per_device_train_batch_size = per_device_eval_batch_size = 4
    num_train_epochs, gradient_accumulation_steps, checkpointing_steps = 2, 2, 3
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=gradient_accumulation_steps, project_dir=folder)
    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.WARNING)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(47)
    if accelerator.is_main_process:
        os.makedirs(folder, exist_ok=True)
    accelerator.wait_for_everyone()

    config = AutoConfig.for_model(
        "bert",
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=2,
    )
    model = AutoModelForSequenceClassification.from_config(config)
    with accelerator.main_process_first():
        train_dataset, eval_dataset = Sentences(30), Sentences(24, first=100)
    order = torch.Generator().manual_seed(1)
    train_dataloader = DataLoader(
        train_dataset,
        shuffle=True,
        generator=order,
        collate_fn=padded,
        batch_size=per_device_train_batch_size,
    )
    eval_dataloader = DataLoader(eval_dataset, collate_fn=padded, batch_size=per_device_eval_batch_size)

    no_decay = ["bias", "LayerNorm.weight"]
    parameters = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in parameters if not any(nd in n for nd in no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in parameters if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / gradient_accumulation_steps)
    max_train_steps = num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = get_scheduler(
        name="linear",
        optimizer=optimizer,
        num_warmup_steps=1 * accelerator.num_processes,
        num_training_steps=max_train_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / gradient_accumulation_steps)
    max_train_steps = num_train_epochs * num_update_steps_per_epoch
    total_batch_size = per_device_train_batch_size * accelerator.num_processes * gradient_accumulation_steps
    logger.info(f"  Total train batch size (w. parallel, distributed & accumulation) = {total_batch_size}")

    completed_steps = starting_epoch = 0
    resume_step = None
    if resume_from_checkpoint is not None:
        accelerator.load_state(resume_from_checkpoint)
        training_difference = os.path.splitext(os.path.basename(resume_from_checkpoint))[0]
        resume_step = int(training_difference.replace("step_", "")) * gradient_accumulation_steps
        starting_epoch = resume_step // len(train_dataloader)
        completed_steps = resume_step // gradient_accumulation_steps
        resume_step -= starting_epoch * len(train_dataloader)

    metric, report = Accuracy(), [total_batch_size]
    for epoch in range(starting_epoch, num_train_epochs):
        model.train()
        total_loss = 0
        if resume_from_checkpoint is not None and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for batch in active_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                if completed_steps % checkpointing_steps == 0 and resume_from_checkpoint is None:
                    accelerator.save_state(os.path.join(folder, f"step_{completed_steps}"))
            report.append((accelerator.gather(loss.detach()).tolist(), lr_scheduler.get_last_lr()))
            if completed_steps >= max_train_steps:
                break
        model.eval()
        losses, samples_seen = [], 0
        for step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(per_device_eval_batch_size)))
            predictions, references = accelerator.gather((outputs.logits.argmax(dim=-1), batch["labels"]))
            if accelerator.num_processes > 1:
                if step == len(eval_dataloader) - 1:
                    predictions = predictions[: len(eval_dataloader.dataset) - samples_seen]
                    references = references[: len(eval_dataloader.dataset) - samples_seen]
                else:
                    samples_seen += references.shape[0]
            metric.add_batch(predictions=predictions, references=references)
        report.append((torch.cat(losses).mean().item(), metric.compute(), total_loss.item() / len(train_dataloader)))

    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    if accelerator.is_main_process:
        with open(os.path.join(folder, "all_results.json"), "w", encoding="utf-8") as file:
            json.dump({"completed_steps": completed_steps}, file)
    accelerator.wait_for_everyone()
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    weights = unwrapped_model.state_dict()
    report.append(all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items()))
    report.append(sum(weight.double().sum().item() for weight in weights.values()))
    return report


def main(folder):
    whole = train(folder)
    return [whole, train(folder, resume_from_checkpoint=os.path.join(folder, "step_3"))]
