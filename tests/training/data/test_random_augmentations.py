"""Random augmentations of a dataset draw the same numbers as under accelerate."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.training.accelerator import Accelerator


class Augmented(Dataset):
    """Rows with the numbers that a random augmentation would draw, of all kinds."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return index, torch.rand(()).item(), random.random(), np.random.rand()


def augmentations(accelerator, make):
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    loader = accelerator.prepare(make())
    return [([column.tolist() for column in batch], torch.rand(()).item()) for _ in range(2) for batch in loader]


@pytest.mark.slow
def test_random_augmentations_draw_what_they_draw_under_accelerate(run_ranks):
    def compare():
        from accelerate import Accelerator as Theirs
        from accelerate.utils import DataLoaderConfiguration as TheirConfiguration

        def generator():
            return torch.Generator().manual_seed(3)

        data = Augmented()
        workers = {"num_workers": 1, "batch_size": 4}
        kinds = {
            "in order": lambda: DataLoader(data, 4),
            "seedable": lambda: DataLoader(data, 4, shuffle=True),
            "seedable in workers": lambda: DataLoader(data, shuffle=True, **workers),
            "seedable in workers that stay": lambda: DataLoader(data, shuffle=True, persistent_workers=True, **workers),
            "generator": lambda: DataLoader(data, 4, shuffle=True, generator=generator()),
            "generator in workers": lambda: DataLoader(data, shuffle=True, generator=generator(), **workers),
            "sampler": lambda: DataLoader(data, 4, sampler=RandomSampler(data, generator=generator())),
        }
        for name, make in kinds.items():
            seedable = name.startswith("seedable")
            config = DataLoaderConfiguration(use_seedable_sampler=seedable)
            ours = augmentations(Accelerator(cpu=True, dataloader_config=config), make)
            config = TheirConfiguration(use_seedable_sampler=seedable)
            theirs = augmentations(Theirs(cpu=True, dataloader_config=config), make)
            assert ours == theirs, name

    pytest.importorskip("accelerate")
    run_ranks(compare, deadline=55)
