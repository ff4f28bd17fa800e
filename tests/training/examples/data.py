"""What the example scripts train on: rows that are made here, so that nothing is downloaded."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 24


class Sentences(Dataset):
    """Sentences of different lengths with a label."""

    def __init__(self, rows: int, first: int = 0) -> None:
        self.rows, self.first = rows, first

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, object]:
        number = index + self.first
        words = [1 + (number * 7 + place * 3) % (VOCABULARY - 1) for place in range(3 + number % 4)]
        return {"input_ids": words, "labels": number % 2}


def padded(rows: list[dict[str, object]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)  # type: ignore[arg-type]
    ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]  # type: ignore[operator,arg-type]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor([row["labels"] for row in rows])}


class Classifier(nn.Module):
    """A bag of words with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop, self.head = nn.Embedding(VOCABULARY, 8), nn.Dropout(0.1), nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.drop(self.words(input_ids).mean(dim=1)))
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = nn.functional.cross_entropy(logits, labels)
        return found


class LanguageModel(nn.Module):
    """Predicts each word from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(input_ids))


def loaders(batch_size: int = 4, train_rows: int = 30, eval_rows: int = 22) -> tuple[DataLoader, DataLoader]:
    """A loader that shuffles by a generator of its own, and one that does not shuffle."""
    order = torch.Generator().manual_seed(42)
    train = DataLoader(Sentences(train_rows), batch_size, shuffle=True, collate_fn=padded, generator=order)
    return train, DataLoader(Sentences(eval_rows, first=100), batch_size, collate_fn=padded)


class Accuracy:
    """Counts right answers, as metrics of libraries do."""

    def __init__(self) -> None:
        self.right, self.total = 0, 0

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.right += int((predictions == references).sum())
        self.total += len(references)

    def compute(self) -> dict[str, float]:
        found = {"accuracy": self.right / self.total, "rows": self.total}
        self.right, self.total = 0, 0
        return found
