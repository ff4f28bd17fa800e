"""Accumulate a language model's gradients so that each word of a large batch counts equally, however it is cut."""

import contextlib
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW
from training.examples.data import VOCABULARY, LanguageModel, loaders


def main(folder):
    gradient_accumulation_steps = 2
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=gradient_accumulation_steps)
    set_seed(13)
    train_dataloader, eval_dataloader = loaders(batch_size=3)
    model = LanguageModel()
    optimizer = AdamW(params=model.parameters(), lr=1e-2)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=0)
    report = []
    for _epoch in range(2):
        model.train()
        training_iterator = iter(train_dataloader)
        num_samples_in_epoch = len(train_dataloader)
        remainder = num_samples_in_epoch % gradient_accumulation_steps or gradient_accumulation_steps
        total_gradient_updates = math.ceil(num_samples_in_epoch / gradient_accumulation_steps)
        for update in range(total_gradient_updates):
            count = remainder if update == total_gradient_updates - 1 else gradient_accumulation_steps
            batches = [next(training_iterator) for _ in range(count)]
            num_items = sum((batch["input_ids"][:, 1:] != 0).sum() for batch in batches)
            num_items = accelerator.gather(num_items).sum().item()
            losses = []
            for index, batch in enumerate(batches):
                last = index == count - 1
                context = contextlib.nullcontext if last else lambda: accelerator.no_sync(model)
                with context():
                    logits = model(batch["input_ids"])[:, :-1]
                    loss = criterion(logits.reshape(-1, VOCABULARY), batch["input_ids"][:, 1:].reshape(-1))
                    scaled = loss * gradient_accumulation_steps * accelerator.num_processes / num_items
                    accelerator.backward(scaled)
                losses.append(loss.detach())
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total = accelerator.gather(torch.stack(losses).sum()).sum().item() / num_items
            report.append((total, norm.item(), num_items))
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                logits = model(batch["input_ids"])[:, :-1]
            each = nn.functional.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
            losses.append(accelerator.gather_for_metrics(each.mean(dim=1)))
        report.append(math.exp(torch.cat(losses).mean()))
    accelerator.end_training()
    return report
