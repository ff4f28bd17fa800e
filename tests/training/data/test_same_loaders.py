"""Loaders have equally many rows on all ranks, which draw the same split of the data without a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks

ROWS = 2000


def test_a_split_without_a_seed_is_the_same_on_all_ranks(run_ranks: RunRanks):
    first, second = run_ranks(lambda: np.random.permutation(ROWS).tolist())
    assert first == second


def test_loaders_of_other_lengths_are_refused_on_all_ranks_before_any_waits(run_ranks: RunRanks):
    def prepare() -> str:
        from torch import nn
        from torch.utils.data import DataLoader

        from nb_accelerate import Accelerator
        from nb_accelerate.errors import CollectiveMismatchError

        accelerator = Accelerator()
        loaders = [DataLoader(range(8)), DataLoader(range(8 + 2 * accelerator.process_index))]  # type: ignore[arg-type]
        try:
            accelerator.prepare(nn.Linear(1, 1), *loaders)
        except CollectiveMismatchError as error:
            return str(error)
        return ""

    first, second = run_ranks(prepare)
    assert first == second
    assert "number 2 has 8 rows on rank 0, so 4 batches for each rank, and 10 rows on rank 1, so 5 batches." in first
