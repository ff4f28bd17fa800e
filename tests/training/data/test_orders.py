"""A run that goes on in the middle of an epoch reads the rows of one that was not interrupted, in the same order.

Loaders shuffle as their users wrote them, without a seed of ours. A run goes on in a process with another seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.ranks import RunRanks
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nb_accelerate import Accelerator, DataLoaderConfiguration
from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.process import context

ROWS = 22


class Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return index


class Own(Sampler):
    """One of the user's, that draws from the numbers of the process."""

    def __init__(self, permuted: Callable[[], Any]) -> None:
        self.permuted = permuted

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter([int(row) for row in self.permuted()])


class OneByOne(Own):
    """It draws each row when it is asked for."""

    def __iter__(self):
        for _ in range(ROWS):
            yield int(torch.randint(ROWS, ()))


class OwnGenerator(Own):
    def __init__(self) -> None:
        self.numbers = np.random.default_rng(5)

    def __iter__(self):
        return iter(self.numbers.permutation(ROWS).tolist())


class OwnBatches(BatchSampler):
    """Batches of the user's, in an order of their own."""

    def __iter__(self):
        batches = list(super().__iter__())
        random.shuffle(batches)
        return iter(batches)


class Shuffled(IterableDataset):
    """A stream that shuffles with the numbers of the process."""

    def __iter__(self):
        rows = list(range(ROWS))
        random.shuffle(rows)
        return iter(rows)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def sampled(sampler: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size=2, sampler=sampler, **options)


WORKERS: dict[str, Any] = {"num_workers": 2}
STAY: dict[str, Any] = {**WORKERS, "persistent_workers": True}
KINDS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": lambda: DataLoader(Rows(), batch_size=2, shuffle=True),
    "generator": lambda: DataLoader(Rows(), batch_size=2, shuffle=True, generator=generator()),
    "generator of the sampler": lambda: sampled(RandomSampler(Rows(), generator=generator())),
    "replacement": lambda: sampled(RandomSampler(Rows(), replacement=True, num_samples=40)),
    "weighted": lambda: sampled(WeightedRandomSampler([*range(1, ROWS + 1)], ROWS)),
    "weighted, generator": lambda: sampled(WeightedRandomSampler([1.0] * ROWS, ROWS, generator=generator())),
    "subset": lambda: sampled(SubsetRandomSampler(range(3, ROWS))),
    "own, torch": lambda: sampled(Own(lambda: torch.randperm(ROWS))),
    "own, numpy": lambda: sampled(Own(lambda: np.random.permutation(ROWS))),
    "own, python": lambda: sampled(Own(lambda: random.sample(range(ROWS), ROWS))),
    "own generator": lambda: sampled(OwnGenerator()),
    "own batches": lambda: DataLoader(Rows(), batch_sampler=OwnBatches(RandomSampler(Rows()), 2, drop_last=False)),
    "stream": lambda: DataLoader(Shuffled(), batch_size=2),
    "items": lambda: DataLoader(Rows(), batch_size=None, shuffle=True),
}
ALIKE_ON_ANY_RANKS = ("shuffle", "generator", "generator of the sampler", "replacement", "weighted, generator")
IN_WORKERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "workers": lambda: DataLoader(Rows(), batch_size=2, shuffle=True, **WORKERS),
    "workers that stay": lambda: DataLoader(Rows(), batch_size=2, shuffle=True, **STAY),
    "workers that stay, generator": lambda: DataLoader(
        Rows(), batch_size=2, shuffle=True, generator=generator(), **STAY
    ),
    "own, torch, in workers": lambda: sampled(Own(lambda: torch.randperm(ROWS)), **WORKERS),
    "one by one in workers": lambda: sampled(OneByOne(lambda: ()), **WORKERS),
    "stream in workers": lambda: DataLoader(Shuffled(), batch_size=2, num_workers=1),
}


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def numbers() -> tuple[Any, ...]:
    return torch.rand(()).item(), random.random(), np.random.rand()


def rows(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def begin(make: Callable[[], DataLoader[Any]], where: Path, first_seed: int, **options: Any) -> tuple[Any, Any]:
    seed(first_seed)
    context.reset()
    accelerator = Accelerator(cpu=True, project_dir=where, dataloader_config=DataLoaderConfiguration(**options))
    _, loader = accelerator.prepare(nn.Linear(1, 1), make())
    seed(first_seed)  # the same on all ranks: samplers of the user's rely on it
    return accelerator, loader


def uninterrupted(kind: str, where: str, stops: Any, *, draws: bool = True, **options: Any) -> tuple[Any, Any]:
    """Save at some epochs and batches; return all batches with numbers drawn beside them, and positions."""
    torch.set_num_threads(1)
    accelerator, loader = begin((KINDS | IN_WORKERS)[kind], Path(where), 3, **options)
    whole: list[Any] = []
    positions = {}
    for epoch in range(3):
        for number, batch in enumerate(loader, 1):
            whole.append((epoch, number, rows(batch), numbers() if draws else ()))
            if (epoch, number) in stops:
                positions[epoch, number] = loader.state_dict()
                accelerator.save_state(f"{where}/{epoch} {number}")
        if (epoch + 1, 0) in stops:
            accelerator.save_state(f"{where}/{epoch + 1} 0")
    return whole, positions


def gone_on(
    kind: str, where: str, stop: Any, position: Any, *, draws: bool = True, **options: Any
) -> tuple[list[Any], list[Any]]:
    """Return the batches after a checkpoint, and those after a position, both in a process with other numbers."""
    torch.set_num_threads(1)
    make = (KINDS | IN_WORKERS)[kind]
    accelerator, loader = begin(make, Path(where), 77, **options)
    accelerator.load_state(f"{where}/{stop[0]} {stop[1]}")
    rest: list[Any] = []
    for epoch in range(stop[0], 3):
        before = stop[1] if epoch == stop[0] else 0
        leave_out = before and not loader.use_stateful_dataloader
        batches = accelerator.skip_first_batches(loader, before) if leave_out else loader
        for number, batch in enumerate(batches, before + 1):
            rest.append((epoch, number, rows(batch), numbers() if draws else ()))
    _, loader = begin(make, Path(where), 78, **options)
    if position is not None:
        loader.load_state_dict(position)
    return rest, [] if position is None else [rows(batch) for batch in loader]


def check(kind: str, stop: Any, whole: list[Any], found: tuple[list[Any], list[Any]]) -> None:
    """Compare what `gone_on` returned with the run that was not interrupted."""
    left = [one for one in whole if one[:2] > stop]
    rest, after_position = found
    assert rest == left, (kind, stop)
    if after_position and not kind.startswith("one by one"):  # which goes on with the numbers of the process
        assert after_position == [one[2] for one in left if one[0] == stop[0]], (kind, stop)


def compare(kind: str, where: Path, stops: Any = ((0, 2), (1, 0), (1, 3)), **options: Any) -> None:
    whole, positions = uninterrupted(kind, str(where), stops, **options)
    for stop in stops:
        check(kind, stop, whole, gone_on(kind, str(where), stop, positions.get(stop), **options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stateful", [False, True])
def test_one_process_goes_on_in_the_order_of_the_epoch(kind: str, stateful: bool, tmp_path: Path):
    compare(kind, tmp_path, use_stateful_dataloader=stateful)


@pytest.mark.parametrize(
    ("kind", "stateful"),
    [
        ("workers", False),
        ("stream in workers", False),
        *(
            pytest.param(kind, stateful, marks=pytest.mark.slow)
            for kind in IN_WORKERS
            for stateful in (False, True)
            if stateful or kind not in ("workers", "stream in workers")
        ),
    ],
)
def test_one_process_with_workers_goes_on_in_the_order_of_the_epoch(kind: str, stateful: bool, tmp_path: Path):
    # What is drawn one by one is disturbed by what the loop draws in between.
    compare(kind, tmp_path, ((1, 0), (1, 3)), use_stateful_dataloader=stateful, draws=kind != "one by one in workers")


@pytest.mark.parametrize(
    "order",
    [
        3,
        {"began": 3},
        {"now": ["generator"]},
        {"began": {"torch": {"dtype": "uint8", "data": "AAAA"}}},
        {"began": {"numpy": {"dtype": "object", "data": "AAAA"}}},
        {"began": {"python": [3, {"dtype": "uint32", "data": "AAAA"}, None]}},
        {"now": {"loader": {"dtype": "uint8", "data": "AAAA"}}},
    ],
)
def test_what_draws_no_order_is_refused(order: Any):
    loader = Accelerator(cpu=True).prepare(KINDS["generator"]())
    with pytest.raises(CheckpointError, match="random numbers that draw"):
        loader.load_state_dict({"epoch": 0, "position": 2, "order": order})


@pytest.mark.parametrize("kind", ["shuffle", "generator", "own, numpy"])
@pytest.mark.parametrize("stateful", [False, True])
def test_an_epoch_that_goes_on_twice_is_in_its_order(kind: str, stateful: bool, tmp_path: Path):
    whole, _ = uninterrupted(kind, str(tmp_path), ((1, 3),), use_stateful_dataloader=stateful)
    found: list[Any] = []
    for stop, end, another_seed in ((3, 6, 50), (6, 99, 51)):
        accelerator, loader = begin(KINDS[kind], tmp_path, another_seed, use_stateful_dataloader=stateful)
        accelerator.load_state(tmp_path / f"1 {stop}")
        rest = loader if stateful else accelerator.skip_first_batches(loader, stop)
        for number, batch in enumerate(rest, stop + 1):
            found.append((1, number, rows(batch), numbers()))
            if number == end:
                accelerator.save_state(tmp_path / f"1 {end}")
                break
    assert found == [one for one in whole if (1, 3) < one[:2] < (2, 0)]


@pytest.mark.parametrize(
    ("before", "after", "kinds", "options"),
    [
        (2, 2, ("shuffle", "generator"), {}),
        pytest.param(2, 2, tuple(KINDS), {}, marks=pytest.mark.slow),
        pytest.param(2, 2, tuple(KINDS), {"dispatch_batches": True}, marks=pytest.mark.slow),
        pytest.param(2, 2, tuple(KINDS), {"use_stateful_dataloader": True}, marks=pytest.mark.slow),
        pytest.param(1, 2, ALIKE_ON_ANY_RANKS, {"split_batches": True}, marks=pytest.mark.slow),
        pytest.param(2, 1, ALIKE_ON_ANY_RANKS, {"split_batches": True}, marks=pytest.mark.slow),
    ],
)
def test_ranks_go_on_in_the_order_of_the_epoch(
    run_ranks: RunRanks, tmp_path: Path, before: int, after: int, kinds: tuple[str, ...], options: dict[str, Any]
):
    stops = ((1, 0), (1, 3))
    options = {**options, "draws": before == after}  # a rank that was not there before has no numbers to go on with

    def first() -> list[Any]:
        from training.data.test_orders import uninterrupted

        return [uninterrupted(kind, f"{tmp_path}/{kind}", stops, **options) for kind in kinds]

    def second(positions: list[Any]) -> list[Any]:
        from training.data.test_orders import gone_on

        rank = Accelerator(cpu=True).process_index
        own = positions[rank] if before == after else [{}] * len(kinds)
        return [
            [gone_on(kind, f"{tmp_path}/{kind}", stop, saved.get(stop), **options) for stop in stops]
            for kind, saved in zip(kinds, own, strict=True)
        ]

    whole = run_ranks(first, world_size=before, deadline=55)
    positions = [[position for _, position in of_rank] for of_rank in whole]
    found = run_ranks(second, positions, world_size=after, deadline=55)
    for number, kind in enumerate(kinds):
        for index, stop in enumerate(stops):
            if before == after:
                for rank in range(before):
                    check(kind, stop, whole[rank][number][0], found[rank][number][index])
            else:
                left = joined([whole[rank][number][0] for rank in range(before)])
                rest = joined([found[rank][number][index][0] for rank in range(after)])
                assert rest == {place: left[place] for place in left if place > stop}, (kind, stop)


def joined(of_ranks: list[Any]) -> dict[Any, list[int]]:
    """Return the rows of all ranks by epoch and batch."""
    found: dict[Any, list[int]] = {}
    for of_rank in of_ranks:
        for epoch, number, batch, _ in of_rank:
            found.setdefault((epoch, number), []).extend(batch)
    return found
