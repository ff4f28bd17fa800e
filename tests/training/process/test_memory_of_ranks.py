"""What ranks hold in memory is measured as arithmetic says, shown, and told when memory does not suffice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from nb_accelerate.base.progress_page import RankMemory, here
from nb_accelerate.base.progress_page.sample import read
from nb_accelerate.training.accelerator import Accelerator

WIDTH = 512


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


WHOLE = 4 * (WIDTH * WIDTH + WIDTH) * 4  # bytes of its parameters


def held() -> RankMemory:
    here().measure()
    return read(here().buffer).held


def train_and_measure(sharded: bool) -> list[RankMemory]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin() if sharded else None)
    model: Any = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    found = [held()]
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, WIDTH)).sum())
        found.append(held())
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = accelerator.free_memory(model, optimizer)
    return [*found, held()]


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sharded", [False, True])
def test_each_rank_holds_what_arithmetic_says(run_ranks, sharded, ranks):
    is_spread = sharded and ranks > 1
    share = WHOLE / (ranks if is_spread else 1)
    for prepared, first, second, freed in run_ranks(train_and_measure, sharded, world_size=ranks):
        for found, gradients, optimizer in ((prepared, 0, 0), (first, 1, 0), (second, 1, 2)):
            assert found.parameters == pytest.approx(share, rel=0.1)
            assert found.gradients == pytest.approx(gradients * share, rel=0.1)
            assert found.optimizer == pytest.approx(optimizer * share, rel=0.1)
            assert found.pending == pytest.approx((3 - gradients - optimizer) * share, rel=0.1)
            assert found.sharding == (f"FSDP, dp_shard {ranks}" if is_spread else "")
            # Memory that imports have freed is still the process', and may hold the parameters.
            assert found.states + found.base <= found.used + WHOLE
            assert found.base <= found.used <= min(found.peak, found.limit)
        assert (freed.states, freed.sharding) == (0, "")


def train_with_too_little(rows: int) -> None:
    import resource

    import psutil

    accelerator = Accelerator(cpu=True)
    model: Any = make_model()
    loader: Any = DataLoader(TensorDataset(torch.zeros(4 * rows, WIDTH)), batch_size=rows)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    if accelerator.process_index == 1:
        most = psutil.Process().memory_info().vms + 150 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for (inputs,) in loader:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def test_a_run_that_is_short_of_memory_says_who_held_what_and_what_to_turn_on(run_ranks):
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        run_ranks(train_with_too_little, 30_000)
    [told] = [note for note in caught.value.__notes__ if note.startswith("What each rank had in memory")]
    lines = told.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert lines[3].endswith("  <- failed")
    assert "4.2 MB" in lines[3]
    assert "30,000: batch_size=15000" in told
    assert "torch.utils.checkpoint" in told


def test_another_error_says_nothing_about_memory(run_ranks):
    def fail() -> None:
        Accelerator(cpu=True).prepare(make_model())
        raise RuntimeError("of another kind")

    with pytest.raises(RuntimeError, match="of another kind") as caught:
        run_ranks(fail)
    assert not [note for note in caught.value.__notes__ if "Memory" in note]
