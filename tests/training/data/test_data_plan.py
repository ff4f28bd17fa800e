"""Which rows go to which rank, against counting by hand."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.data.plan.plan import GroupRows, ShardPlan, split_between
from nb_accelerate.training.data.plan.samplers import BatchSamplerShard, SamplerShard, SeedableRandomSampler
from nb_accelerate.training.data.reading.iterable import IterableDatasetShard, LastRow, MarkingShard

CASES = {
    "rows": st.integers(0, 60),
    "batch_size": st.integers(1, 7),
    "ranks": st.integers(1, 5),
    "drop_last": st.booleans(),
    "split": st.booleans(),
    "even": st.booleans(),
}


def deal_by_hand(rows, batch_size, ranks, drop_last, split, even):
    """Deal out rows one by one, as one would with cards. Returns each rank's batches, and the real rows at the end."""
    local = batch_size // ranks if split else batch_size
    hands = [[] for _ in range(ranks)]
    left, endless = list(range(rows)), itertools.cycle(range(rows))
    while left:
        table, left = left[: local * ranks], left[local * ranks :]
        real = len(table)
        if real < local * ranks:
            if drop_last:
                return hands, 0
            while even and len(table) < local * ranks:
                table.append(next(endless))
        for rank in range(ranks):
            mine = [table.pop(0) for _ in range(min(local, len(table)))]
            if mine:
                hands[rank].append(mine)
        if real < local * ranks:
            return hands, real
    return hands, 0


def sharded(sampler, ranks, split, even):
    return [BatchSamplerShard(sampler, ranks, rank, split, even) for rank in range(ranks)]


class OwnOrder(BatchSampler):
    """A user's batch sampler: a type we do not know, so its batches are taken as they come."""


@settings(max_examples=400, deadline=None)
@given(**CASES)
@example(rows=5, batch_size=4, ranks=3, drop_last=False, split=False, even=True)
@example(rows=1, batch_size=6, ranks=3, drop_last=False, split=True, even=True)
@example(rows=7, batch_size=2, ranks=2, drop_last=False, split=False, even=False)
def test_every_way_of_sharing_out_equals_dealing_rows_by_hand(rows, batch_size, ranks, drop_last, split, even):
    if split:
        batch_size *= ranks
    hands, real = deal_by_hand(rows, batch_size, ranks, drop_last, split, even)
    plan = ShardPlan(
        rows=rows,
        batch_size=batch_size,
        world_size=ranks,
        drop_last=drop_last,
        split_batches=split,
        even_batches=even,
    )
    assert [list(plan.batches(range(rows), rank)) for rank in range(ranks)] == hands
    assert [plan.num_batches(rank) for rank in range(ranks)] == [len(hand) for hand in hands]
    assert plan.remainder == real
    for kind in (BatchSampler, OwnOrder):
        shards = sharded(kind(SequentialSampler(range(rows)), batch_size, drop_last), ranks, split, even)
        assert [list(shard) for shard in shards] == hands
        if kind is BatchSampler or even or not split:  # else only an epoch can tell
            assert [len(shard) for shard in shards] == [len(hand) for hand in hands]
        takes_part = [even or real > rank * plan.local_size for rank in range(ranks)]
        assert [shard.end.rows.real for shard in shards] == [real if real and part else None for part in takes_part]
        for shard, hand in zip(shards, hands, strict=True):
            assert shard.end.rows.real is None or shard.end.rows.on_rank == len(hand[-1])


@settings(max_examples=150, deadline=None)
@given(**CASES)
def test_iterable_datasets_are_shared_out_like_all_others(rows, batch_size, ranks, drop_last, split, even):
    if split:
        batch_size *= ranks
    hands, real = deal_by_hand(rows, batch_size, ranks, drop_last, split, even)
    for rank in range(ranks):
        options = (range(rows), batch_size, drop_last, ranks, rank, split)
        assert list(IterableDatasetShard(*options, even_batches=even)) == list(itertools.chain(*hands[rank]))
        shard = MarkingShard(*options, even_batches=even)
        got = list(shard)
        marks = [row.real for row in got if isinstance(row, LastRow)]
        assert [row.row if isinstance(row, LastRow) else row for row in got] == list(itertools.chain(*hands[rank]))
        assert set(marks) <= {real}
        assert len(shard) == len(got)


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(0, 60), batch_size=st.integers(1, 7), ranks=st.integers(1, 5), even=st.booleans())
def test_no_row_is_lost_and_only_even_batches_repeats_any(rows, batch_size, ranks, even):
    plan = ShardPlan(rows=rows, batch_size=batch_size, world_size=ranks, even_batches=even)
    seen = Counter(row for rank in range(ranks) for batch in plan.batches(range(rows), rank) for row in batch)
    assert set(seen) == set(range(rows))
    if not even:
        assert set(seen.values()) <= {1}


@settings(max_examples=100, deadline=None)
@given(**CASES, skip=st.integers(0, 12))
def test_skipping_groups_leaves_the_rest_as_it_was(rows, batch_size, ranks, drop_last, split, even, skip):
    plan = ShardPlan(
        rows=rows,
        batch_size=batch_size * ranks,
        world_size=ranks,
        drop_last=drop_last,
        split_batches=split,
        even_batches=even,
    )
    for rank in range(ranks):
        whole = list(plan.batches(range(rows), rank))
        assert list(plan.batches(range(rows), rank, start=skip)) == whole[skip:]


@settings(max_examples=100, deadline=None)
@given(items=st.integers(0, 30), ranks=st.integers(1, 5), even=st.booleans())
def test_items_that_are_batches_go_round_the_ranks(items, ranks, even):
    shards = [SamplerShard(range(items), ranks, rank, even_batches=even) for rank in range(ranks)]
    hands, real = deal_by_hand(items, 1, ranks, False, False, even)
    assert [list(shard) for shard in shards] == [list(itertools.chain(*hand)) for hand in hands]
    assert [len(shard) for shard in shards] == [len(hand) for hand in hands]
    assert all(shard.end.rows.real in {None, real} for shard in shards)


@given(length=st.integers(0, 40), ranks=st.integers(1, 6), pad=st.booleans())
def test_split_between_cuts_in_order_and_pads_with_the_last(length, ranks, pad):
    whole = list(range(length))
    parts = [split_between(whole, rank, ranks, pad=pad) for rank in range(ranks)]
    tensors = [split_between(torch.tensor(whole), rank, ranks, pad=pad).tolist() for rank in range(ranks)]
    assert tensors == parts
    if pad and length:
        assert {len(part) for part in parts} == {-(-length // ranks)}
        assert set(itertools.chain(*parts)) == set(whole)
    else:
        assert list(itertools.chain(*parts)) == whole
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_shuffled_order_is_drawn_once_per_epoch():
    generator = torch.Generator().manual_seed(3)
    shard = BatchSamplerShard(BatchSampler(RandomSampler(range(12), generator=generator), 2, False), 2, 0)
    reference = RandomSampler(range(12), generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        order = list(reference)
        assert list(shard) == [order[0:2], order[4:6], order[8:10]]


@pytest.mark.parametrize("rows", [1, 7, 40_000])
@pytest.mark.parametrize("options", [{}, {"generator": True}, {"num_samples": 5}, {"replacement": True}])
def test_the_order_of_a_random_sampler_is_the_one_it_would_yield(rows, options):
    def sampler():
        given = dict(options)
        if "generator" in given:
            given["generator"] = torch.Generator().manual_seed(3)
        torch.manual_seed(5)
        return RandomSampler(range(rows), **given)

    one, other = sampler(), sampler()
    torch.manual_seed(5)
    expected = [list(one) for _ in range(3)] + [torch.rand(1).item()]
    torch.manual_seed(5)
    shard = BatchSamplerShard(BatchSampler(other, 3, False), even_batches=False)
    assert [[row for batch in shard for row in batch] for _ in range(3)] + [torch.rand(1).item()] == expected


@pytest.mark.parametrize("start", [0, 3, 5_000])
@pytest.mark.parametrize(("rows", "batch_size"), [(5, 4), (8, 4), (0, 4), (10_007, 3), (5_000, 2_000)])
def test_rows_in_a_tensor_are_shared_out_like_those_of_a_list(rows, batch_size, start):
    numbers = torch.randperm(rows)
    plan = ShardPlan(rows=rows, batch_size=batch_size, world_size=2)
    for rank in range(2):
        of_tensor, of_list = (list(plan.batches(order, rank, start=start)) for order in (numbers, numbers.tolist()))
        assert of_tensor == of_list


def test_batches_that_cannot_be_split_evenly_are_refused_with_sizes_that_can():
    with pytest.raises(ConfigError, match=r"into 2.*batch_size=4 or 6"):
        BatchSamplerShard(BatchSampler(SequentialSampler(range(9)), 5, False), 2, 0, True)


def rounds_by_hand(batches, ranks, drop_last, even):
    """Deal out whole batches, one for each rank in turn. Returns each rank's, and the real rows of the last round."""
    hands, real = [[] for _ in range(ranks)], 0
    for first in range(0, len(batches), ranks):
        table = batches[first : first + ranks]
        if len(table) < ranks:
            if drop_last:
                break
            real = sum(map(len, table))
            again = itertools.cycle(batches[:ranks])
            while even and len(table) < ranks:
                table.append(next(again))
        for hand, batch in zip(hands, table, strict=False):
            hand.append(batch)
    return hands, real


class Varying:
    """A user's sampler of batches whose sizes differ, such as texts of similar length."""

    def __init__(self, batches, drop_last):
        self.batches, self.drop_last = batches, drop_last

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), max_size=13),
    ranks=st.integers(1, 6),
    drop_last=st.booleans(),
    even=st.booleans(),
    skip=st.integers(0, 4),
)
@example(sizes=[3], ranks=3, drop_last=False, even=True, skip=0)
@example(sizes=[1, 2, 3], ranks=2, drop_last=False, even=False, skip=1)
def test_batches_of_varying_size_go_round_whole(sizes, ranks, drop_last, even, skip):
    numbers = iter(range(sum(sizes)))
    batches = [[next(numbers) for _ in range(size)] for size in sizes]
    hands, real = rounds_by_hand(batches, ranks, drop_last, even)
    shards = sharded(Varying(batches, drop_last), ranks, False, even)
    assert [list(shard) for shard in shards] == hands
    assert [len(shard) for shard in shards] == [len(hand) for hand in hands]
    for rank, shard in enumerate(shards):
        takes_part = len(hands[rank]) > len(sizes) // ranks
        assert shard.end.rows.real == (real if real and takes_part else None)
        assert list(shard.starting_at(skip)) == hands[rank][skip:]
    if real and even:  # padded to the longest, they are those that come before the repeated batches
        last = [hand[-1] for hand in hands]
        padded = [row for batch in last for row in (batch + [-1] * max(sizes))[: max(map(len, last))]]
        of_ranks = tuple(len(batch) for batch in last)
        kept = padded[: GroupRows(real, of_ranks[0], of_ranks).real_entries([max(of_ranks)] * len(last))]
        assert [row for row in kept if row >= 0] == list(range(sum(sizes) - real, sum(sizes)))
    if not drop_last:  # gathered in rank order, the real rows come first
        steps = [[hand[step] for hand in hands if step < len(hand)] for step in range(len(hands[0]))]
        gathered = [[row for batch in step for row in batch] for step in steps]
        if real:
            gathered[-1] = gathered[-1][:real]
        assert [row for step in gathered for row in step] == list(range(sum(sizes)))


def test_batches_of_no_fixed_size_cannot_be_split():
    with pytest.raises(ConfigError, match="batch_size, so its batches"):
        BatchSamplerShard([[0], [1, 2]], 2, 0, split_batches=True)


def test_a_seedable_sampler_takes_the_seed_of_torch():
    torch.manual_seed(11)
    sampler, told = SeedableRandomSampler(range(9)), SeedableRandomSampler(range(9), data_seed=11)
    torch.rand(3)  # which changes the state, but not the seed
    assert sampler.initial_seed == told.initial_seed == 11
    for epoch in range(2):
        assert sampler.epoch == epoch
        assert list(sampler) == list(told)
    assert list(sampler) != list(SeedableRandomSampler(range(9), data_seed=12))


def test_batches_of_no_fixed_size_go_round_whole():
    batches = [[0], [1, 2], [3], [4, 5, 6], [7]]
    shards = [BatchSamplerShard(batches, 2, rank, even_batches=False) for rank in range(2)]
    assert [list(shard) for shard in shards] == [[[0], [3], [7]], [[1, 2], [4, 5, 6]]]
    assert [len(shard) for shard in shards] == [3, 2]
