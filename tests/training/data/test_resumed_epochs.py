"""An epoch that goes on in its middle: for any kind of loader and any way to go on, the rest is as it would have been.

The ways are a position, a position of a loader of torchdata, and a loader without its first batches.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from nb_accelerate import Accelerator, DataLoaderConfiguration

pytest.importorskip("torchdata")


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[int]:
        return iter(range(23))


class Counting(IterableDataset[int]):
    """A stream that knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 23:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loader(data: Any, **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(data, **{"batch_size": 3, **options})


def seeded(kind: Any, *arguments: Any, **options: Any) -> Callable[[], DataLoader[Any]]:
    def make() -> DataLoader[Any]:
        sampler = kind(*arguments, generator=torch.Generator().manual_seed(4))
        return DataLoader(range(23), batch_size=3, sampler=sampler, **options)

    return make


KINDS = {
    "in order": loader(range(23)),
    "shuffled": seeded(RandomSampler, range(23)),
    "weighted": seeded(WeightedRandomSampler, [1.0] * 23, 23),
    "drop_last": loader(range(23), drop_last=True),
    "workers": seeded(RandomSampler, range(23), num_workers=1),
    "stream": loader(Stream()),
    "items that are batches": loader(torch.arange(23)[:, None], batch_size=None, sampler=range(23)),
    "batch sampler as sampler": loader(
        torch.arange(23), batch_size=None, sampler=BatchSampler(SequentialSampler(range(23)), 3, False)
    ),
}
WAYS = ("position", "stateful", "skipped")


def plain(state: Any) -> Any:
    """Return a state that can be compared."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


def rows(loader: Any) -> list[Any]:
    return [(batch.tolist(), loader.position, loader.remainder, loader.batch_remainder) for batch in loader]


def check(way: str, make: Callable[[], DataLoader[Any]], stop: int, **config: Any) -> None:
    """Go on after batch ``stop`` of the second epoch, and compare with three epochs that nothing interrupts."""
    if way != "skipped":
        config |= {"use_seedable_sampler": True, "data_seed": 1, "use_stateful_dataloader": way == "stateful"}
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    loader = accelerator.prepare(make())
    whole = [rows(loader) for _ in range(3)]
    again = accelerator.prepare(make())
    stop = min(stop, len(whole[1]) - 1)
    list(again)
    if way == "skipped":
        resumed = accelerator.skip_first_batches(again, stop + 1)
        if config.get("even_batches", True) or not isinstance(again.dataset, IterableDataset):
            assert (len(again), len(resumed)) == (len(whole[1]), len(whole[1]) - stop - 1)
    else:
        for number, _ in enumerate(again):
            if number == stop:
                state = again.state_dict()
                break
        resumed = again = accelerator.prepare(make())
        again.load_state_dict(state)
        assert plain(again.state_dict()) == plain(state)  # nothing was read yet
    rest = rows(resumed) if stop + 1 < len(whole[1]) or way == "skipped" else []  # no state is in an epoch that is over
    # What fills up the last batch, where rank 0 reads for all, comes from where reading began.
    compared = slice(None, -1 if config.get("dispatch_batches") and whole[1][-1][2] else None)
    assert rest[compared] == whole[1][stop + 1 :][compared], (way, config, stop, rest, whole[1])
    assert rows(again) == whole[2]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on(kind: str, way: str) -> None:
    for stop in (3, 99) if kind == "workers" else (0, 3, 6, 99):
        check(way, KINDS[kind], stop)
    gc.collect()  # torchdata's loader and its iterator hold on to each other, and to their workers


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ranks_go_on(run_ranks: Any, way: str) -> None:
    def all_kinds() -> None:
        torch.set_num_threads(1)
        configs = [{}, {"even_batches": False}, {"dispatch_batches": True}]
        for (number, config), (kind, (name, make)) in itertools.product(enumerate(configs), enumerate(KINDS.items())):
            if name != "workers" or not config:
                check(way, make, (number + kind) % 2 * 2, **config)

    run_ranks(all_kinds, deadline=55)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_that_are_dealt_their_batches_take_up_their_positions(run_ranks: Any, workers: int) -> None:
    def deal(workers: int) -> None:
        torch.set_num_threads(1)
        for data, shuffle in ((range(23), True), (Stream(), False), (Counting(), False)):
            for split, stop in ((False, 0), (False, 2), (True, 1), (False, 99)):
                count = 1 if isinstance(data, IterableDataset) and workers else workers  # each would read all rows
                size = 6 if split else 2
                make = loader(data, batch_size=size, shuffle=shuffle, num_workers=count, drop_last=True)
                check("stateful", make, stop, dispatch_batches=True, split_batches=split)

    run_ranks(deal, workers)
    if not workers:
        run_ranks(deal, workers, world_size=3)
