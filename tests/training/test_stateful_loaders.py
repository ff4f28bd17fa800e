"""Loaders that save their position: after loading it, the rest of the epoch comes."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from nb_accelerate.accelerator import Accelerator
from nb_accelerate.config.loader import DataLoaderConfiguration
from nb_accelerate.data import DataLoaderShard
from nb_accelerate.errors import MissingDependencyError

pytest.importorskip("torchdata")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(23))


def prepared(make):
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=1)
    return Accelerator(cpu=True, dataloader_config=config).prepare(make())


KINDS = {
    "in order": lambda: DataLoader(range(23), batch_size=3),
    "shuffled": lambda: DataLoader(range(23), batch_size=3, shuffle=True),
    "workers": lambda: DataLoader(range(23), batch_size=3, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(Stream(), batch_size=3),
}


def resume(make, stop):
    """The rows after a saved position of the second epoch, and those that an uninterrupted run sees there."""
    loader = prepared(make)
    whole = [[batch.tolist() for batch in loader] for _ in range(3)]
    loader = prepared(make)
    list(loader)
    for number, _ in enumerate(loader):
        if number == stop:
            state = loader.state_dict()
            break
    again = prepared(make)
    again.load_state_dict(state)
    rest = [(batch.tolist(), again.position) for batch in again]
    following = [batch.tolist() for batch in again]
    if stop + 1 < len(whole[1]):
        positions = [*range(stop + 2, len(whole[1])), 0]
        assert rest == list(zip(whole[1][stop + 1 :], positions, strict=True))
        assert following == whole[2]
    else:  # the epoch was over
        assert [rows for rows, _ in rest] == whole[2]


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_takes_up_its_position(kind):
    for stop in (0, 3, 7):
        resume(KINDS[kind], stop)
    gc.collect()  # torchdata's loader and its iterator hold on to each other, and to their workers


def test_ranks_take_up_their_positions(run_ranks):
    def all_kinds():
        torch.set_num_threads(1)
        for kind in ("in order", "shuffled", "stream"):
            for stop in (1, 3):
                resume(KINDS[kind], stop)

    run_ranks(all_kinds)


def test_a_stateful_loader_of_the_users_stays_one():
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = Accelerator(cpu=True).prepare(StatefulDataLoader(range(4), batch_size=2))
    assert isinstance(loader, StatefulDataLoader)
    assert isinstance(loader, DataLoaderShard)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert type(loader).__name__ == "StatefulDataLoaderShard"


def test_without_torchdata_the_extra_is_named(monkeypatch):
    from nb_accelerate.data.stateful import stateful

    stateful.cache_clear()
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    monkeypatch.setattr("nb_accelerate.data.prepare.is_stateful", lambda _: False)
    with pytest.raises(MissingDependencyError, match=r"needs the package 'torchdata'.*nb-accelerate\[torchdata\]"):
        prepared(KINDS["in order"])
    stateful.cache_clear()
