"""Kinds of batches beside kinds of loaders on two ranks: no row is lost, doubled, or mixed with another's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from fixtures.batch_kinds import KINDS
from torch.utils.data import DataLoader, IterableDataset

from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.errors import ConfigError, DispatchError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.data import skip_first_batches


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Sharded(Stream):
    num_shards = 2

    def shard(self, num_shards, index):
        return Stream(self.items[index::num_shards])


SIZES = [(7, 2, False), (6, 2, False), (11, 4, False), (2, 4, False), (11, 4, True)]  # rows, batch_size, drop_last
CASES = {
    "stream": (Stream, {}),
    "split stream": (Stream, {"split_batches": True}),
    "sharded stream": (Sharded, {}),
    "dispatched": (list, {"dispatch_batches": True}),
    "split": (list, {"dispatch_batches": True, "split_batches": True}),
    "uneven": (list, {"dispatch_batches": True, "even_batches": False}),
    "split, uneven": (Stream, {"split_batches": True, "even_batches": False}),
}


def prepared(loader, config):
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config)).prepare(loader)


def read_all(names):
    """Return the rows of each step on this rank, by case. Compares nothing, so that ranks stay in step."""
    torch.set_num_threads(1)
    found = {}
    for name, (case, (data, config)), (rows, size, drop_last) in itertools.product(names, CASES.items(), SIZES):
        loader = DataLoader(data(list(range(rows))), batch_size=size, drop_last=drop_last, collate_fn=KINDS[name].make)
        found[name, case, rows, size, drop_last] = [KINDS[name].rows_of(batch) for batch in prepared(loader, config)]
    return found


@pytest.mark.slow
@pytest.mark.limit(60)
def test_rows_stay_together_and_arrive_once(run_ranks):
    ranks = run_ranks(read_all, tuple(KINDS), deadline=55)
    for key, steps in ranks[0].items():
        _, case, rows, size, drop_last = key
        other = ranks[1][key]
        if "uneven" not in case:
            assert len(steps) == len(other), (key, steps, other)
        dealt = [row for pair in itertools.zip_longest(steps, other, fillvalue=[]) for part in pair for row in part]
        group = size if "split" in case else 2 * size
        kept = rows - rows % group if drop_last else rows
        if "sharded" in case:
            assert sorted(set(dealt)) == list(range(rows)) or drop_last, (key, steps, other)
            continue
        assert dealt[:kept] == list(range(kept)), (key, steps, other)
        assert set(dealt[kept:]) <= set(range(group)), (key, steps, other)
        assert not (dealt[kept:] and ("uneven" in case or drop_last)), (key, steps, other)


def test_batches_that_are_ready_are_split_exactly_or_refused_at_the_first(run_ranks):
    kinds = {name: kind for name, kind in KINDS.items() if name != "count"}  # numbers are handed on as they are

    def read():
        torch.set_num_threads(1)
        found = {}
        for (name, kind), split in itertools.product(kinds.items(), (False, True)):
            items = [kind.make(rows) for rows in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10])]
            loader = prepared(DataLoader(Stream(items), batch_size=None), {"split_batches": split})
            try:
                found[name, split] = [kind.rows_of(batch) for batch in loader]
            except (ConfigError, DispatchError) as error:
                found[name, split] = str(error)
        return found

    whole = [[0, 1, 2, 3], [8, 9, 10]], [[4, 5, 6, 7], [0, 1, 2, 3]]
    parts = [[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 0]]
    refused = {"time first", "mask first", "grid", "patches", "graph", "packed sequence", "own object", "subclass"}
    refused |= {"sparse", "nested", "jagged", "detection", "list of dicts", "list of samples"}
    for rank, found in enumerate(run_ranks(read)):
        for name in kinds:
            assert found[name, False] == whole[rank], name
            if name in refused:
                assert "Write split_batches=False" in found[name, True], name
            elif name in ("ragged widths", "single values", "size in pixels"):  # are not filled up
                assert found[name, True] == (parts[0] if rank == 0 else [[2, 3], [6, 7], [10]])
            else:
                assert found[name, True] == parts[rank], name
        assert "batch['grid'] of shape (5, 2)" in found["grid", True]
        assert "Graph, whose rows" in found["graph", True]


def test_a_last_batch_without_rows_is_handed_out(run_ranks):
    def read():
        items = [torch.arange(2), torch.arange(2, 4), torch.arange(4, 6), torch.arange(0)]
        return [
            [batch.tolist() for batch in prepared(DataLoader(Stream(items), batch_size=None), {"split_batches": split})]
            for split in (False, True)
        ]

    assert run_ranks(read) == [[[[0, 1], [4, 5]], [[0], [2], [4], []]], [[[2, 3], []], [[1], [3], [5], []]]]


def test_split_batches_are_those_that_each_rank_would_make_of_its_rows(run_ranks):
    def read(dispatch):
        def padded(rows):
            return torch.nn.utils.rnn.pad_sequence([torch.full((row + 1,), row) for row in rows], batch_first=True)

        loader = DataLoader(range(8), batch_size=4, collate_fn=padded)
        return [batch.tolist() for batch in prepared(loader, {"split_batches": True, "dispatch_batches": dispatch})]

    assert run_ranks(read, dispatch=True) == run_ranks(read, dispatch=False)


def test_arrays_are_cut_and_joined_with_their_tensors(run_ranks):
    def read():
        def collate(rows):
            return {"x": torch.tensor(rows), "ids": np.array(rows)}

        return [
            {name: values.tolist() for name, values in batch.items()}
            for batch in prepared(DataLoader(Stream(range(7)), batch_size=2, collate_fn=collate), {})
        ][-1]

    assert run_ranks(read) == [{"x": rows, "ids": rows} for rows in ([4, 5], [6, 0])]


def test_what_fills_the_end_is_the_same_if_the_beginning_is_left_out(run_ranks):
    def read():
        kind = KINDS["grid"]
        loader = prepared(DataLoader(Stream(range(8)), batch_size=2, collate_fn=kind.make), {})
        return [[kind.read(batch) for batch in one] for one in (loader, skip_first_batches(loader, 1))]

    ends = [6, 7], [0, 1], [2, 3]
    beginnings = [0, 1], [2, 3], [4, 5]
    assert run_ranks(read, world_size=3) == [
        [[first, last], [last]] for first, last in zip(beginnings, ends, strict=True)
    ]


def test_batches_may_be_of_classes_that_only_the_launched_function_knows(run_ranks):
    @dataclass
    class Own:
        x: torch.Tensor

    class Image(torch.Tensor):
        pass

    def read():
        def collate(rows):
            return Own(torch.tensor(rows).as_subclass(Image))

        loader = prepared(DataLoader(Stream(range(4)), batch_size=2, collate_fn=collate), {})
        return [(type(batch) is Own, type(batch.x) is Image, batch.x.tolist()) for batch in loader]

    assert run_ranks(read) == [[(True, True, [0, 1])], [(True, True, [2, 3])]]


def test_columns_of_default_collate_are_cut_also_where_there_are_as_many_as_rows(run_ranks):
    def read():
        data = [(torch.full((3,), row), torch.tensor([row])) for row in range(6)]
        loader = prepared(DataLoader(Stream(data), batch_size=2), {})
        return [[column[:, 0].tolist() for column in batch] for batch in loader]

    assert run_ranks(read) == [[[[0, 1]] * 2, [[4]] * 2], [[[2, 3]] * 2, [[5]] * 2]]
