"""Metrics of all processes, over rows that do not divide evenly: by hand, and with gather_for_metrics."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from training.examples.data import Accuracy, Classifier, loaders


def main(folder):
    accelerator = Accelerator(cpu=True)
    set_seed(23)
    train_dataloader, eval_dataloader = loaders(eval_rows=23)
    model = Classifier()
    optimizer = AdamW(params=model.parameters(), lr=1e-2)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    by_hand, metric, report = Accuracy(), Accuracy(), []
    for _epoch in range(2):
        model.train()
        for batch in train_dataloader:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        samples_seen, words = 0, []
        for step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                predictions = model(**batch)["logits"].argmax(dim=-1)
            predictions_all, references_all = accelerator.gather((predictions, batch["labels"]))
            if accelerator.use_distributed:
                if step == len(eval_dataloader) - 1:
                    predictions_all = predictions_all[: len(eval_dataloader.dataset) - samples_seen]
                    references_all = references_all[: len(eval_dataloader.dataset) - samples_seen]
                else:
                    samples_seen += references_all.shape[0]
            by_hand.add_batch(predictions_all, references_all)
            metric.add_batch(*accelerator.gather_for_metrics((predictions, batch["labels"])))
            ids = accelerator.pad_across_processes(batch["input_ids"], dim=1, pad_index=-1)
            words.append(accelerator.gather_for_metrics(ids).sum().item())
        report.append((by_hand.compute(), metric.compute(), words))
    accelerator.end_training()
    return report
