"""A model that is prepared again has the weights of rank 0 on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks


def weight_after_loading() -> float:
    from nb_accelerate import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    best = {"weight": torch.full((1, 1), 1.0 + accelerator.process_index), "bias": torch.zeros(1)}
    accelerator.unwrap_model(model).load_state_dict(best)
    model = accelerator.prepare(model)
    return accelerator.unwrap_model(model).weight.item()


def test_weights_that_were_prepared_again_are_those_of_rank_0(run_ranks: RunRanks):
    assert run_ranks(weight_after_loading) == [1.0, 1.0]
