"""Resume in the middle of an epoch, end it with ranks apart: the rest is what it would have been."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.data import skip_first_batches


class Counted(Dataset):
    """Counts the rows that are read."""

    def __init__(self, rows):
        self.rows = rows
        self.reads = 0

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        self.reads += 1
        return torch.tensor(index)


class Stream(IterableDataset):
    def __init__(self, rows, counts=True):
        self.rows = rows
        if counts:
            self.__class__ = StreamThatKnowsItsLength

    def __iter__(self):
        return iter(range(self.rows))


class StreamThatKnowsItsLength(Stream):
    def __len__(self):
        return self.rows


def test_a_million_rows_are_skipped_without_reading_one():
    data = Counted(1_000_000)
    loader = Accelerator(cpu=True).prepare(DataLoader(data, batch_size=8))
    rest = skip_first_batches(loader, 100_000)
    assert next(iter(rest)).tolist() == list(range(800_000, 800_008))
    assert data.reads == 16  # one batch, and one ahead
    twice = skip_first_batches(rest, 10_000)
    assert next(iter(twice))[0] == 880_000
    assert (len(rest), len(twice), twice.skip_batches) == (25_000, 15_000, 110_000)


def test_loaders_that_were_not_prepared_are_skipped_too():
    assert [batch.tolist() for batch in skip_first_batches(DataLoader(range(7), batch_size=2), 2)] == [[4, 5], [6]]
    with pytest.raises(ConfigError, match="num_batches=-1 is too small"):
        skip_first_batches(DataLoader(range(7)), -1)


def test_the_position_says_how_much_of_the_epoch_is_done():
    loader = Accelerator(cpu=True).prepare(DataLoader(range(9), batch_size=2))
    assert [loader.position for _ in skip_first_batches(loader, 2)] == [0, 0, 0]
    rest = skip_first_batches(loader, 2)
    assert [rest.position for _ in rest] == [3, 4, 0]


def test_an_epoch_with_a_beginning_skipped_counts_as_one():
    class Shuffled(SequentialSampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

    sampler = Shuffled(range(4))
    loader = Accelerator(cpu=True).prepare(DataLoader(range(4), sampler=sampler))
    seen = []
    for which in (skip_first_batches(loader, 1), loader, loader):
        for _ in which:
            pass
        seen.append(sampler.epoch)
    assert seen == [0, 1, 2]
    sampler.set_epoch(7)  # by someone who holds the sampler: it is left at that
    list(loader)
    assert sampler.epoch == 7
    loader.set_epoch(5)
    list(loader)
    assert (sampler.epoch, loader.iteration) == (5, 6)


def test_lengths_are_right_in_every_case(run_ranks):
    def measure():
        torch.set_num_threads(1)
        found = []
        for rows in (1, 7, 8, 9, 23):
            for config in (
                {},
                {"even_batches": False},
                {"split_batches": True},
                {"dispatch_batches": True},
                {"dispatch_batches": True, "split_batches": True},
            ):
                for drop_last in (False, True):
                    for data in (range(rows), Stream(rows)):
                        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
                        loader = accelerator.prepare(DataLoader(data, batch_size=4, drop_last=drop_last))
                        said = len(loader)
                        found.append((rows, config, drop_last, type(data).__name__, said, len(list(loader))))
        return found

    for found in run_ranks(measure):
        for *case, said, counted in found:
            assert said == counted, case


def test_ranks_with_different_numbers_of_batches_train_to_the_end(run_ranks):
    def train():
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        data = TensorDataset(torch.arange(12.0)[:, None])
        model, loader = nn.Linear(1, 1), DataLoader(data, batch_size=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        before, rows = loader.even, []
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for (inputs,) in loader:
                rows += inputs.flatten().tolist()
                optimizer.zero_grad()
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
        return rows, before, loader.even, len(loader), [p.detach().clone() for p in model.parameters()]

    (first, *flags, weights), (second, *_, same) = run_ranks(train)
    assert (first, second) == ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7])
    assert flags == [True, True, 2]
    # By hand: the mean of both batches; then half of the one that is left, since torch divides by the ranks.
    torch.manual_seed(0)
    model, rows = nn.Linear(1, 1), torch.arange(12.0)[:, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batches in ((rows[:4], rows[4:8]), (rows[8:],)):
        optimizer.zero_grad()
        sum(model(batch).square().mean() / 2 for batch in batches).backward()
        optimizer.step()
    for one, other, expected in zip(weights, same, model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        torch.testing.assert_close(one, expected.detach(), rtol=0, atol=1e-6)


def test_the_last_batch_of_a_process_closes_the_window_of_all(run_ranks):
    def train():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.arange(5.0)[:, None])
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=1))
        closed = []
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for (inputs,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(inputs).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    closed.append(accelerator.sync_gradients)
        return closed, [p.detach().clone() for p in model.parameters()]

    (first, weights), (second, same) = run_ranks(train)
    assert (first, second) == ([False, True, True], [False, True])
    torch.manual_seed(0)
    model, rows = nn.Linear(1, 1), torch.arange(5.0)[:, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for window in (rows[:4], rows[4:]):
        optimizer.zero_grad()
        (model(window).square().sum() / 3 / 2).backward()
        optimizer.step()
    for one, other, expected in zip(weights, same, model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        torch.testing.assert_close(one, expected.detach(), rtol=0, atol=1e-6)


def test_one_process_has_nobody_to_join():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    with accelerator.join_uneven_inputs([], even_batches=False):
        assert len(list(loader)) == 3
    with pytest.raises(ConfigError, match="even_batches='no'"), accelerator.join_uneven_inputs([], even_batches="no"):
        pass
