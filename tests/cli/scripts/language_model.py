"""Train a small language model on the characters of a text file, as a script that people bring along would.

It is written against the interface that both libraries have; ``--library`` says which one it imports.
"""

import argparse
import importlib
import json
import math
from pathlib import Path

import torch
from torch.utils.data import DataLoader


class Model(torch.nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        layer = torch.nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


def loss_of(model: torch.nn.Module, blocks: torch.Tensor) -> torch.Tensor:
    logits = model(blocks[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", default="nb_accelerate")
    parser.add_argument("--train_file", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--block_size", type=int, default=16)
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--num_train_epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    library = importlib.import_module(args.library)
    accelerator = library.Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    importlib.import_module(f"{args.library}.utils").set_seed(args.seed)

    text = args.train_file.read_text()
    numbers = {letter: number for number, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([numbers[letter] for letter in text])
    blocks = list(tokens[: len(tokens) // args.block_size * args.block_size].view(-1, args.block_size))
    split = len(blocks) * 4 // 5
    train = DataLoader(blocks[:split], batch_size=args.per_device_train_batch_size)
    validation = DataLoader(blocks[split:], batch_size=args.per_device_train_batch_size)

    model = Model(len(numbers), 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    steps = args.num_train_epochs * math.ceil(len(train) / args.gradient_accumulation_steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    model, optimizer, train, validation, scheduler = accelerator.prepare(model, optimizer, train, validation, scheduler)
    losses, perplexities = [], []
    for _ in range(args.num_train_epochs):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        seen = []
        for batch in validation:
            with torch.no_grad():
                loss = loss_of(model, batch)
            seen.append(accelerator.gather_for_metrics(loss.repeat(len(batch))))
        perplexities.append(math.exp(torch.cat(seen).mean().item()))
    if accelerator.is_main_process:
        found = {"losses": losses, "validation": perplexities, "processes": accelerator.num_processes}
        args.output.write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
