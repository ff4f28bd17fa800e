"""Loaders know where they are: any prepared loader saves its position, and goes on from there without reading again."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, SubsetRandomSampler

from nb_accelerate import Accelerator, DataLoaderConfiguration
from nb_accelerate.data_loader import (
    DataLoaderAdapter,
    DataLoaderShard,
    DataLoaderStateMixin,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.state import GradientState


class Rows(Dataset):
    """Notes what was read of it."""

    def __init__(self, rows: int = 23) -> None:
        self.rows = rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(23))


KINDS = {
    "in order": lambda: DataLoader(Rows(), batch_size=3),
    "shuffled": lambda: DataLoader(Rows(), batch_size=3, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=3),
}


def prepared(kind: str, **options: Any) -> Any:
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1, **options)
    return Accelerator(cpu=True, dataloader_config=config).prepare(KINDS[kind]())


def lists(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def test_a_position_at_the_end_is_that_of_the_next_epoch():
    loader = prepared("shuffled")
    for _ in loader:
        state = loader.state_dict()
    assert state == loader.state_dict() == {"epoch": 1, "position": 0}
    again = prepared("shuffled")
    again.load_state_dict(state)
    assert lists(again) == lists(loader)


def test_ranks_that_are_dealt_their_rows_go_on_from_their_positions(run_ranks):
    def both(kind: str):
        accelerator = Accelerator(cpu=True)
        found = []
        for position in (0, 2):
            loader = prepared(kind, dispatch_batches=True)
            loader.load_state_dict({"epoch": 0, "position": position})
            # The last batch is filled up with rows that were read, so with others if the first were not.
            found.append([accelerator.gather(batch).tolist()[: loader.batch_remainder] for batch in loader])
        return found

    for kind in KINDS:
        for whole, rest in run_ranks(both, kind):
            assert rest == whole[2:]


def test_metrics_are_exact_in_an_epoch_that_goes_on(run_ranks):
    def evaluate():
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(Rows(21), batch_size=4))
        loader.load_state_dict({"epoch": 0, "position": 2})
        rest: list[int] = []
        for batch in loader:
            rest += accelerator.gather_for_metrics(batch).tolist()
        return rest

    assert run_ranks(evaluate) == [[16, 17, 18, 19, 20]] * 2


def test_what_is_left_out_is_not_read():
    data = Rows()
    loader = Accelerator(cpu=True).prepare(DataLoader(data, batch_size=3))
    loader.load_state_dict({"epoch": 0, "position": 6})
    assert lists(loader) == [[18, 19, 20], [21, 22]]
    assert data.read == [18, 19, 20, 21, 22]


def test_a_subclass_may_change_what_is_saved():
    class ReadsAhead(DataLoaderAdapter):
        def adjust_state_dict_for_prefetch(self) -> None:
            self.dl_state_dict["position"] -= 1

    loader = ReadsAhead(range(10), batch_size=2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert loader.state_dict() == {"epoch": 0, "position": 2}
    assert loader.dl_state_dict == {"epoch": 0, "position": 2}


def test_an_adapter_is_a_loader_of_torch_or_of_torchdata():
    loader = DataLoaderAdapter(range(5), batch_sampler=[[0, 1], [4]])
    assert isinstance(loader, DataLoader)
    assert not loader.use_stateful_dataloader
    assert type(loader.base_dataloader) is DataLoader
    assert lists(loader) == [[0, 1], [4]]


def test_settings_of_a_loader_are_those_of_the_one_that_reads():
    loader = Accelerator(cpu=True).prepare(DataLoader(range(6), batch_size=2))
    loader.collate_fn = sum
    assert loader.base_dataloader.collate_fn is loader.collate_fn is sum
    assert [*loader] == [1, 5, 9]
    assert [*skip_first_batches(loader, 1)] == [5, 9]
    loader.load_state_dict({"epoch": 0, "position": 2})
    assert [*loader] == [9]
    with pytest.raises(ValueError, match="batch_size attribute should"):
        loader.batch_size = 4
    assert not hasattr(loader, "no_setting_of_a_loader")
    assert [*copy.deepcopy(loader)] == [1, 5, 9]


@pytest.mark.may_leave("threads")
def test_loaders_made_by_hand_may_be_stateful():
    pytest.importorskip("torchdata")
    for make in (
        lambda: DataLoaderAdapter(range(10), use_stateful_dataloader=True, batch_size=2),
        lambda: DataLoaderAdapter(range(10), True, batch_size=2),
        lambda: DataLoaderShard(range(10), use_stateful_dataloader=True, batch_size=2),
        lambda: SkipDataLoader(range(12), skip_batches=1, use_stateful_dataloader=True, batch_size=2),
    ):
        loader = make()
        assert loader.use_stateful_dataloader
        whole = lists(make())
        for number, _ in enumerate(loader):
            if number == 2:
                break
        again = make()
        again.load_state_dict(loader.state_dict())
        assert lists(again) == whole[3:]


def test_samplers_can_be_replaced():
    loader = Accelerator(cpu=True).prepare(DataLoader(range(6), batch_size=2))
    assert type(loader.get_sampler()) is type(get_sampler(loader)) is SequentialSampler
    reverse = SubsetRandomSampler(range(6))
    reverse.__class__ = type("Reverse", (SubsetRandomSampler,), {"__iter__": lambda _: iter(range(5, -1, -1))})
    loader.set_sampler(reverse)
    assert loader.get_sampler() is reverse
    assert lists(loader) == [[5, 4], [3, 2], [1, 0]]


def test_a_replaced_sampler_is_in_step_on_all_ranks(run_ranks):
    def rows():
        torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(accelerator.process_index)
        data = Rows(12)
        loader = accelerator.prepare(DataLoader(data, batch_size=2))
        assert lists(loader)[0] == [[0, 1], [2, 3]][accelerator.process_index]
        loader.set_sampler(RandomSampler(data))
        return sorted(accelerator.gather(torch.cat(list(loader))).tolist()), lists(loader)

    (first, mine), (second, others) = run_ranks(rows)
    assert first == second == list(range(12))
    assert sorted(row for batch in mine + others for row in batch) == list(range(12))
    assert mine + others != [[row, row + 1] for row in (*range(0, 12, 4), *range(2, 12, 4))]


def test_a_loader_without_a_sampler_says_so():
    loader = Accelerator(cpu=True).prepare(DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]))
    with pytest.raises(ConfigError, match="list has no sampler"):
        loader.set_sampler(SequentialSampler(range(4)))


class Halves(DataLoaderStateMixin):
    """A loader of the user's: each rank gets its half of ten rows, the last two as a copy of the first."""

    total_batch_size = 4
    total_dataset_length = 10

    def __init__(self, rank: int) -> None:
        self.gradient_state = GradientState()
        self.rank = rank

    def __iter__(self):
        self.begin()
        for first in (0, 4, 8):
            self.end_of_dataloader = first == 8
            rows = [(first + 2 * self.rank + i) % 10 for i in range(2)]
            yield torch.tensor(rows)
        self.end()


def test_the_loop_knows_loaders_of_ones_own(run_ranks):
    def evaluate():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader = Halves(accelerator.process_index)
        rows: list[int] = []
        windows = []
        for batch in loader:
            with accelerator.accumulate():
                windows.append(accelerator.sync_gradients)
            assert accelerator.gradient_state.active_dataloader is loader
            rows += accelerator.gather_for_metrics(batch).tolist()
        assert not accelerator.gradient_state.in_dataloader
        return rows, windows

    assert run_ranks(evaluate) == [(list(range(10)), [False, True, True])] * 2


def test_a_loader_that_is_begun_again_has_forgotten_its_end():
    loader = Accelerator(cpu=True).prepare(DataLoader(range(4), batch_size=2))
    list(loader)
    assert loader.end_of_dataloader
    batches = iter(loader)
    next(batches)
    assert not loader.end_of_dataloader
    assert loader.remainder == -1
    batches.close()


@pytest.mark.parametrize("batches", [1, None])
@pytest.mark.parametrize("sampler", [RandomSampler, SubsetRandomSampler])
def test_a_shuffling_sampler_draws_as_much_as_it_does_without_us(batches: int | None, sampler: Any):
    drawn = []
    for prepare in (
        lambda loader: loader,
        Accelerator(cpu=True).prepare,
        lambda loader: prepare_data_loader(loader, num_processes=2, rng_types=[]),
    ):
        generator = torch.Generator().manual_seed(5)
        order = sampler(range(42), generator=generator)
        loader = prepare(DataLoader(range(42), batch_size=3, sampler=order))
        rows = [batch.tolist() for batch in itertools.islice(loader, batches)]  # to the end, or left early
        drawn.append((rows[0], torch.randint(2**60, (1,), generator=generator).item()))
    assert drawn[0] == drawn[1] == drawn[2]


def test_a_loader_without_its_beginning_is_forgotten_with_the_whole_one():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(9), batch_size=3))
    batches = iter(skip_first_batches(loader, 1))
    next(batches)
    assert accelerator.gradient_state.in_dataloader
    accelerator.clear()
    assert not accelerator.gradient_state.in_dataloader
