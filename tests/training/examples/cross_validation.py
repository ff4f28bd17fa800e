"""Train one model for each fold, and let them vote on a test set."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader, Subset
from training.examples.data import Accuracy, Classifier, Sentences, padded


def fold_loaders(accelerator, train_indices, valid_indices, batch_size=4):
    rows = Sentences(30)
    order = torch.Generator().manual_seed(3)
    train = DataLoader(Subset(rows, train_indices), batch_size, shuffle=True, collate_fn=padded, generator=order)
    valid = DataLoader(Subset(rows, valid_indices), batch_size, collate_fn=padded)
    return train, valid, DataLoader(Sentences(10, first=60), batch_size, collate_fn=padded)


def main(folder):
    num_folds, test_predictions, test_references, report = 3, [], [], []
    metric = Accuracy()
    accelerator = Accelerator(cpu=True)
    set_seed(5)
    for fold in range(num_folds):
        valid_indices = [index for index in range(30) if index % num_folds == fold]
        train_indices = [index for index in range(30) if index % num_folds != fold]
        train_dataloader, eval_dataloader, test_dataloader = fold_loaders(accelerator, train_indices, valid_indices)
        model = Classifier().to(accelerator.device)
        optimizer = AdamW(params=model.parameters(), lr=1e-2)
        model, optimizer, train_dataloader, eval_dataloader, test_dataloader = accelerator.prepare(
            model, optimizer, train_dataloader, eval_dataloader, test_dataloader
        )
        for _epoch in range(2):
            model.train()
            for batch in train_dataloader:
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                report.append(accelerator.gather(loss.detach()).tolist())
            model.eval()
            for batch in eval_dataloader:
                with torch.no_grad():
                    predictions = model(**batch)["logits"].argmax(dim=-1)
                metric.add_batch(*accelerator.gather_for_metrics((predictions, batch["labels"])))
            report.append(metric.compute())
        fold_predictions = []
        for batch in test_dataloader:
            with torch.no_grad():
                predictions = model(**batch)["logits"]
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            fold_predictions.append(predictions.cpu())
            if fold == 0:
                test_references.append(references.cpu())
        test_predictions.append(torch.cat(fold_predictions, dim=0))
        model, optimizer = accelerator.free_memory(model, optimizer)
    votes = torch.stack(test_predictions, dim=0).sum(dim=0).div(num_folds).argmax(dim=-1)
    metric.add_batch(votes, torch.cat(test_references))
    accelerator.end_training()
    return [report, metric.compute()]
