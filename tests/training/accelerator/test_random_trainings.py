"""Trainings put together at random: losses and weights against accelerate.

Every case is made from a number, which is printed when something differs: ``Training.of(number)`` is that case again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.training.accelerator import Accelerator

WORLD = 2


class Samples(Dataset):
    """Rows of a regression."""

    def __init__(self, rows):
        generator = torch.Generator().manual_seed(rows)
        self.x = torch.randn(rows, 3, generator=generator)
        self.y = torch.randn(rows, 1, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class SampleStream(IterableDataset):
    def __init__(self, rows):
        self.samples = Samples(rows)

    def __iter__(self):
        return (self.samples[index] for index in range(len(self.samples)))


@dataclass(frozen=True)
class Training:
    number: int
    kind: str
    rows: int
    size: int
    drop_last: bool
    split: bool
    dispatch: bool | None
    accumulation: int
    optimizer: str
    schedule: str
    clip: float | None
    precision: str
    dropout: bool
    twice: bool

    @classmethod
    def of(cls, number: int) -> Training:
        draw = random.Random(number)
        size = draw.randint(1, 5)
        kind = draw.choice(["in order", "seedable", "loader generator", "sampler generator", "stream"])
        dispatch = draw.choice([None, None, True])
        return cls(
            number=number,
            kind=kind,
            rows=draw.randint(size * WORLD, 24),  # accelerate cannot dispatch nothing
            size=size,
            drop_last=draw.random() < 0.3,
            split=size % WORLD == 0 and draw.random() < 0.4,
            # accelerate forgets the generator of a loader that it dispatches.
            dispatch=None if kind == "loader generator" else dispatch,
            accumulation=draw.choice([1, 2, 3]),
            optimizer=draw.choice(["sgd", "adamw"]),
            schedule=draw.choice(["", "step", "cosine"]),
            clip=draw.choice([None, 0.1]),
            precision=draw.choice(["no", "no", "bf16"]),
            dropout=draw.random() < 0.4,
            twice=draw.random() < 0.2,
        )

    def run(self, accelerator: Any) -> dict[str, Any]:
        """Train, with an `Accelerator` of ours or of accelerate."""
        torch.manual_seed(self.number)
        model: Any = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Dropout(0.5 if self.dropout else 0.0), torch.nn.Linear(4, 1)
        )
        kinds = {"sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, 0.05)}
        optimizer: Any = kinds[self.optimizer](model.parameters())
        scheduler: Any = None
        if self.schedule == "step":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        elif self.schedule == "cosine":
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        data: Any = SampleStream(self.rows) if self.kind == "stream" else Samples(self.rows)
        options: dict[str, Any] = {"batch_size": self.size, "drop_last": self.drop_last}
        generator = torch.Generator().manual_seed(self.number)
        if self.kind == "seedable":
            options["shuffle"] = True
        elif self.kind == "loader generator":
            options |= {"shuffle": True, "generator": generator}
        elif self.kind == "sampler generator":
            options["sampler"] = RandomSampler(data, generator=generator)
        loader: Any = DataLoader(data, **options)
        torch.manual_seed(self.number)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if scheduler is not None:
            scheduler = accelerator.prepare(scheduler)
        if self.twice:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses, rates = [], []
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.mse_loss(model(x).float(), y)
                    accelerator.backward(loss)
                    if self.clip is not None and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), self.clip)
                    optimizer.step()
                    if scheduler is not None:
                        scheduler.step()
                    optimizer.zero_grad()
                losses += accelerator.gather(loss.detach()).tolist()
                rates.append(optimizer.param_groups[0]["lr"])
        weights = {name: one.tolist() for name, one in accelerator.unwrap_model(model).state_dict().items()}
        return {"losses": losses, "rates": rates, "weights": weights}


def compare_with_accelerate(numbers) -> list[str]:
    from accelerate import Accelerator as Theirs
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration as TheirConfiguration

    torch.set_num_threads(1)
    wrong = []
    for number in numbers:
        case = Training.of(number)
        config = {
            "split_batches": case.split,
            "dispatch_batches": case.dispatch,
            "use_seedable_sampler": case.kind == "seedable",
            "data_seed": case.number,
        }
        common = {"mixed_precision": case.precision, "gradient_accumulation_steps": case.accumulation, "cpu": True}
        ours = case.run(Accelerator(dataloader_config=DataLoaderConfiguration(**config), **common))
        AcceleratorState._reset_state()
        GradientState._reset_state()
        theirs = case.run(Theirs(dataloader_config=TheirConfiguration(**config), **common))
        wrong += [f"{case}: {key} {ours[key]}, not {theirs[key]}" for key in ours if ours[key] != theirs[key]]
    return wrong


@pytest.mark.slow
def test_random_trainings_are_those_of_accelerate(run_ranks):
    pytest.importorskip("accelerate")
    for wrong in run_ranks(compare_with_accelerate, range(6), deadline=55):
        assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.limit(180)
def test_more_random_trainings_are_those_of_accelerate(run_ranks):
    pytest.importorskip("accelerate")
    for wrong in run_ranks(compare_with_accelerate, range(1000, 1040), deadline=170):
        assert not wrong, "\n".join(wrong)
