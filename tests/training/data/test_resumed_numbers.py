"""A run that is resumed draws the numbers, and repeats the rows, of one that was not interrupted."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.data import skip_first_batches


class Stream(IterableDataset):
    def __iter__(self):
        return (index for index in range(13))


class OfVaryingSize:
    """A batch sampler without a fixed size."""

    def __iter__(self):
        return iter([[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]])

    def __len__(self):
        return 5


def seeded():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def numbers():
    return torch.rand(()).item(), random.random(), np.random.rand()


def states():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def put_back(saved):
    torch.set_rng_state(saved[0])
    random.setstate(saved[1])
    np.random.set_state(saved[2])


def whole_run(make, save):
    """Three epochs: each batch, with numbers drawn beside it; and what is saved during them, by epoch and batch."""
    seeded()
    loader, drawn, saved = make(), [], {}
    for epoch in range(3):
        saved[epoch, 0] = (save(loader), states())
        for number, batch in enumerate(loader, 1):
            drawn.append((epoch, number, batch, numbers()))
            saved[epoch, number] = (save(loader), states())
    return drawn, saved


def assert_resumed(make, stops, *, by_hand):
    drawn, saved = whole_run(make, lambda loader: None if by_hand else loader.state_dict())
    for epoch, stop in stops:
        state, numbers_then = saved[epoch, stop]
        loader = make()
        if by_hand:  # as in scripts
            loader.set_epoch(epoch)
        else:
            loader.load_state_dict(state)
        put_back(numbers_then)
        again = []
        for later in range(epoch, 3):
            rest = skip_first_batches(loader, stop) if by_hand and later == epoch and stop else loader
            before = stop if later == epoch else 0
            again += [(later, before + number, batch, numbers()) for number, batch in enumerate(rest, 1)]
        assert str(again) == str([one for one in drawn if one[:2] > (epoch, stop)]), (epoch, stop, by_hand)


@pytest.mark.parametrize("stateful", [False, True])
def test_workers_that_stay_do_not_change_the_numbers_of_a_resumed_run(stateful):
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1, use_stateful_dataloader=stateful)

    def make():
        loader = DataLoader(range(13), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True)
        return Accelerator(cpu=True, dataloader_config=config).prepare(loader)

    for by_hand in (True, False):
        assert_resumed(make, [(0, 2), (1, 3)] if by_hand else [(0, 2), (1, 0)], by_hand=by_hand)
    gc.collect()  # ends the workers of loaders that refer to themselves


@pytest.mark.slow
def test_a_dispatched_last_group_is_filled_up_with_the_same_rows(run_ranks):
    def compare():
        def prepared(loader, **config):
            config = DataLoaderConfiguration(dispatch_batches=True, **config)
            return Accelerator(cpu=True, dataloader_config=config).prepare(loader)

        kinds = {
            "rows": lambda: prepared(DataLoader(range(13), batch_size=2)),
            "single rows": lambda: prepared(DataLoader(range(13), batch_size=1)),
            "pieces": lambda: prepared(DataLoader(range(13), batch_size=4), split_batches=True),
            "stream": lambda: prepared(DataLoader(Stream(), batch_size=2)),
            "items": lambda: prepared(DataLoader(Stream(), batch_size=None)),
            "varying": lambda: prepared(DataLoader(range(11), batch_sampler=OfVaryingSize())),
            "own sampler": lambda: prepared(
                DataLoader(range(13), batch_sampler=BatchSampler(SequentialSampler(range(13)), 2, drop_last=False))
            ),
            "stateful": lambda: prepared(DataLoader(range(13), batch_size=2), use_stateful_dataloader=True),
            "shuffled": lambda: prepared(
                DataLoader(range(13), batch_size=2, shuffle=True), use_seedable_sampler=True, data_seed=1
            ),
        }
        for name, make in kinds.items():
            for by_hand in (True, False):
                if name == "stateful" and by_hand:
                    continue
                try:
                    assert_resumed(make, [(0, 1), (1, 2)], by_hand=by_hand)
                except AssertionError as error:
                    raise AssertionError(name) from error

    run_ranks(compare, deadline=55)


def test_what_is_read_again_is_skipped_once_when_a_skipping_loader_is_resumed(run_ranks):
    def compare():
        def make():
            config = DataLoaderConfiguration(dispatch_batches=True, use_stateful_dataloader=True)
            return Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(range(17), batch_size=2))

        whole = [batch.tolist() for batch in make()]
        rest = skip_first_batches(make(), 1)
        assert [batch.tolist() for batch in rest] == whole[1:]
        assert [batch.tolist() for batch in skip_first_batches(rest, 2)] == whole[3:]
        for number, _ in enumerate(rest):
            if number == 1:
                state = rest.state_dict()
                break
        again = make()
        again.load_state_dict(state)
        assert [batch.tolist() for batch in again] == whole[3:]

    run_ranks(compare)
