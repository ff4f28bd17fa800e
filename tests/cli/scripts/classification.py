"""Train a classifier on rows of a CSV file, and count how many of the others it gets right.

It is written against the interface that both libraries have; ``--library`` says which one it imports.
"""

import argparse
import csv
import importlib
import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset


def read(path: Path) -> TensorDataset:
    with path.open(newline="") as file:
        rows = [[float(value) for value in row] for row in csv.reader(file)]
    table = torch.tensor(rows)
    return TensorDataset(table[:, :-1], table[:, -1].long())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", default="nb_accelerate")
    parser.add_argument("--train_file", type=Path, required=True)
    parser.add_argument("--validation_file", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    accelerator = importlib.import_module(args.library).Accelerator()
    torch.manual_seed(1)
    train = DataLoader(read(args.train_file), batch_size=args.batch_size)
    validation = DataLoader(read(args.validation_file), batch_size=args.batch_size)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model, optimizer, train, validation = accelerator.prepare(model, optimizer, train, validation)
    losses, accuracies = [], []
    for _ in range(args.epochs):
        model.train()
        for inputs, labels in train:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        model.eval()
        right = total = 0
        for inputs, labels in validation:
            with torch.no_grad():
                predicted = model(inputs).argmax(dim=-1)
            predicted, wanted = accelerator.gather_for_metrics((predicted, labels))
            right += (predicted == wanted).sum().item()
            total += len(wanted)
        accuracies.append([right, total])
    if accelerator.is_main_process:
        found = {"losses": losses, "validation": accuracies, "processes": accelerator.num_processes}
        args.output.write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
