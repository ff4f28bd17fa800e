"""Loaders that save their position: after loading it, the rest of the epoch comes.

What they save is what torchdata's own loader saves, so every test here reads and writes with both.
"""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from training.data.test_resumed_epochs import Counting

from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.data_loader import SkipDataLoader
from nb_accelerate.errors import CheckpointError, MissingDependencyError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.data import DataLoaderShard, skip_first_batches
from nb_accelerate.training.data.dispatching.dispatcher import DataLoaderDispatcher

pytest.importorskip("torchdata")


class Looked(Dataset):
    """Remembers which rows were read."""

    def __init__(self):
        self.rows = []

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.rows.append(index)
        return index


def prepared(make, **config):
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=1, **config)
    return Accelerator(cpu=True, dataloader_config=config).prepare(make())


def of_torchdata(data, **options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, **options)


def lists(loader):
    return [batch.tolist() for batch in loader]


def plain(state):
    """A state that can be compared."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


def state_after(loader, batches):
    """The state while the batch with this number, from 1, is in use."""
    for number, _ in enumerate(loader, 1):
        if number == batches:
            return loader.state_dict()
    raise AssertionError("the loader is shorter")


def in_order():
    return DataLoader(range(23), batch_size=3)


def shuffled(workers=0):
    return DataLoader(range(23), batch_size=3, shuffle=True, num_workers=workers)


def test_rank_zero_saves_where_the_data_is_and_the_others_how_far_they_are(run_ranks):
    def save():
        loader = prepared(lambda: DataLoader(range(24), batch_size=2), dispatch_batches=True)
        assert isinstance(loader, DataLoaderDispatcher)
        first = state_after(loader, 2)
        lists(loader)
        return first, loader.state_dict()

    (first, last), (other, other_last) = run_ranks(save)
    assert first == state_after(of_torchdata(range(24), batch_sampler=DataLoader(range(24), 2).batch_sampler), 4)
    assert other == {"nb_accelerate": {"epoch": 0, "position": 2}}
    assert last["nb_accelerate"] == other_last["nb_accelerate"] == {"epoch": 2, "position": 0}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [DataLoaderShard, SkipDataLoader, DataLoaderDispatcher])
def test_torchdata_and_we_read_what_the_other_wrote(workers, kind):
    from torchdata.stateful_dataloader.sampler import RandomSampler

    def options():
        sampler = RandomSampler(range(20), generator=torch.Generator().manual_seed(3))
        generator = torch.Generator().manual_seed(4)  # workers have their seeds from it
        return {"batch_size": 3, "sampler": sampler, "num_workers": workers, "generator": generator}

    def ours():
        return kind(range(20), use_stateful_dataloader=True, **options())

    reference = of_torchdata(range(20), **options())
    for stop in (1, 4, 6):
        theirs, state = state_after(of_torchdata(range(20), **options()), stop), state_after(ours(), stop)
        assert plain(state) == plain(theirs)
        expected, more, again = of_torchdata(range(20), **options()), of_torchdata(range(20), **options()), ours()
        for loader, origin in ((expected, theirs), (more, state), (again, theirs)):
            loader.load_state_dict(origin)
        rest = lists(expected)
        assert len(rest) == 7 - stop
        assert lists(more) == lists(again) == rest
        assert lists(again) == lists(expected)  # the next epoch has the generator where it would be
    for _ in reference:
        pass
    mine = ours()
    lists(mine)
    assert plain(mine.state_dict()) == plain(reference.state_dict())
    after, fresh = ours(), of_torchdata(range(20), **options())
    after.load_state_dict(reference.state_dict())
    fresh.load_state_dict(mine.state_dict())
    assert lists(after) == lists(fresh) == lists(reference)
    gc.collect()


def test_a_position_of_a_later_epoch_is_one_of_torchdatas_too():
    data = DataLoader(range(12), batch_size=2)
    loader = prepared(lambda: data)
    lists(loader)
    state = state_after(loader, 2)
    assert state["nb_accelerate"] == {"epoch": 1, "position": 2}
    theirs = of_torchdata(range(12), batch_sampler=data.batch_sampler)
    theirs.load_state_dict(state)
    assert lists(theirs) == lists(data)[2:]
    loader.set_epoch(4)  # and now no batch was read yet
    theirs.load_state_dict(loader.state_dict())
    assert lists(theirs) == lists(data)
    assert prepared(lambda: data).state_dict() == {}  # which torchdata takes too
    theirs.load_state_dict({})


def test_saving_between_epochs_changes_nothing():
    def run(save):
        generator = torch.Generator().manual_seed(7)
        loader = Accelerator(cpu=True).prepare(of_torchdata(range(20), batch_size=4, shuffle=True, generator=generator))
        states = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            if save:
                states.append(loader.state_dict())
            state_after(loader, 2)  # and leave the loop
        return lists(loader), states

    whole, _ = run(save=False)
    rows, states = run(save=True)
    assert rows == whole
    assert states[0] == {}
    assert [state["nb_accelerate"] for state in states[2:]] == [{"epoch": 2, "position": 0}]


def test_a_dataset_with_a_state_gets_it_back():
    loader = prepared(lambda: DataLoader(Counting(), batch_size=4))
    whole = lists(loader)
    state = state_after(loader, 3)
    assert state["dataset_state"] == {"at": 12}
    data = Counting()
    again = prepared(lambda: DataLoader(data, batch_size=4))
    again.load_state_dict(state)
    first = next(iter(again))
    assert first.tolist() == whole[3]
    assert data.at == 20  # and one batch further, but nothing was read again from its beginning
    assert again.epoch_and_batch == (1, 4)


def test_of_two_positions_the_last_that_was_loaded_counts():
    middle = state_after(prepared(lambda: DataLoader(Counting(), batch_size=4)), 3)
    loader = prepared(lambda: DataLoader(Counting(), batch_size=4))
    start = loader.state_dict()
    loader.load_state_dict(middle)
    loader.load_state_dict(start)
    assert next(iter(loader)).tolist() == [1, 2, 3, 4]


def test_a_map_of_rows_is_taken_up_without_reading_what_comes_before():
    loader = prepared(lambda: DataLoader(Looked(), batch_size=2, shuffle=True))
    state = state_after(loader, 9)
    data = Looked()
    again = prepared(lambda: DataLoader(data, batch_size=2, shuffle=True))
    again.load_state_dict(state)
    assert lists(again) == lists(prepared(lambda: DataLoader(Looked(), batch_size=2, shuffle=True)))[9:]
    assert len(data.rows) == 6


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_leaves_out_the_beginning_saves_the_position_in_the_whole_epoch(own, workers):
    def make():
        if own:  # of torchdata, with a sampler that has a state
            generator = torch.Generator().manual_seed(7)
            options = {"batch_size": 2, "shuffle": True, "num_workers": workers, "generator": generator}
            return of_torchdata(range(20), **options)
        return DataLoader(range(20), batch_size=2, shuffle=True, num_workers=workers)

    whole = lists(prepared(make))
    loader = prepared(make)
    rest = skip_first_batches(loader, 3)
    state = state_after(rest, 2)
    assert plain(loader.state_dict()) == plain(state)  # both are in the same epoch
    again = prepared(make)
    again.load_state_dict(state)
    assert lists(again) == whole[5:]
    later = skip_first_batches(prepared(make), 2)
    later.load_state_dict(state)
    twice = state_after(later, 1)
    assert later.epoch_and_batch == (0, 6)
    again = prepared(make)
    again.load_state_dict(twice)
    assert lists(again) == whole[6:]
    if own:
        theirs = make()
        theirs.load_state_dict(twice)
        assert lists(theirs) == whole[6:]
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", [False, True])
def test_accelerate_and_we_go_on_where_the_other_stopped(run_ranks, dispatch, tmp_path):
    def both(folder, dispatch):
        import accelerate
        from accelerate.utils import DataLoaderConfiguration as TheirConfiguration

        torch.set_num_threads(1)
        config = {"use_stateful_dataloader": True, "dispatch_batches": dispatch}
        config |= {"use_seedable_sampler": True, "data_seed": 1}
        rests = []
        for first, second in (("theirs", "ours"), ("ours", "theirs"), ("ours", "ours")):
            where = f"{folder}/{first}-{second}"
            for stop in (3, None):
                if (first if stop else second) == "theirs":
                    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=TheirConfiguration(**config))
                else:
                    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
                loader = accelerator.prepare(DataLoader(torch.arange(24.0), batch_size=2, shuffle=not dispatch))
                if stop is None:
                    accelerator.load_state(where)
                    rests.append(lists(loader))
                for number, _ in enumerate(loader, 1):
                    if number == stop:
                        accelerator.save_state(where)
                        accelerator.wait_for_everyone()
                        if first == "theirs" and accelerator.is_main_process:  # whose ranks all write to one file
                            torch.save(loader.state_dict(), f"{where}/dl_state_dict.bin")
                        break
                accelerator.wait_for_everyone()
        return rests

    for world_size in (1, 2):
        for rests in run_ranks(both, str(tmp_path / str(world_size)), dispatch, world_size=world_size):
            assert rests[0] == rests[1] == rests[2]
            assert len(rests[0]) == 12 // world_size - 3


MALFORMED = {
    "nothing of the kind": ([3], "cannot load a list as its position"),
    "positions without torchdata": (
        {"epoch": 0, "position": 2},
        r"KeyError: '_num_yielded'.*given: 'epoch', 'position'",
    ),
    "no number": ({"_num_yielded": -2, "_sampler_iter_yielded": 0}, "-2 is not a number of batches"),
    "half of ours": ({"nb_accelerate": {"epoch": 1}}, "KeyError: 'position'"),
    "half of theirs": ({"_snapshot": {"_snapshot_step": 1}}, "KeyError: '_steps_since_snapshot'"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_what_is_no_position_is_refused_and_changes_nothing(kind):
    state, reason = MALFORMED[kind]
    loader = prepared(in_order)
    with pytest.raises(CheckpointError, match=reason):
        loader.load_state_dict(state)
    assert lists(loader) == lists(in_order())


def test_positions_of_torchdatas_loaders_are_refused_by_others():
    state = state_after(prepared(in_order), 2)
    with pytest.raises(CheckpointError, match="use_stateful_dataloader=True"):
        Accelerator(cpu=True).prepare(in_order()).load_state_dict(state)


def test_another_number_of_workers_is_refused_where_they_had_states():
    def counting(workers):
        return prepared(lambda: DataLoader(Counting(), batch_size=2, num_workers=workers))

    for workers, other in ((0, 1), (1, 0)):
        with pytest.raises(CheckpointError, match=f"Write num_workers={workers}"):
            counting(other).load_state_dict(state_after(counting(workers), 1))
    without = state_after(prepared(lambda: shuffled(workers=1)), 2)  # only the position counts: it does not matter
    loader = prepared(shuffled)
    loader.load_state_dict(without)
    assert lists(loader) == lists(prepared(shuffled))[2:]
    gc.collect()


def test_a_stateful_loader_of_the_users_stays_one():
    loader = Accelerator(cpu=True).prepare(of_torchdata(range(4), batch_size=2, snapshot_every_n_steps=5))
    assert isinstance(loader, type(of_torchdata(range(4))))
    assert isinstance(loader, DataLoaderShard)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert type(loader).__name__ == "StatefulDataLoaderShard"
    assert loader.snapshot_every_n_steps == 5


def test_without_torchdata_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(MissingDependencyError, match=r"package 'torchdata'.*pip install"):
        prepared(in_order)
