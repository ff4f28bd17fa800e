"""Loaders whose data rank 0 reads alone: every rank gets its part, whatever the batches are made of."""

from __future__ import annotations

import itertools
import re
from collections import UserDict, namedtuple
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.errors import ConfigError, DispatchError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.data.dispatching.dispatcher import DataLoaderDispatcher
from nb_accelerate.training.data.dispatching.packing import pack, unpack, write
from nb_accelerate.training.data.plan.plan import part_bounds

Pair = namedtuple("Pair", ["inputs", "numbers"])


class Encoding(UserDict):
    pass


class OnlyOnRankZero(IterableDataset):
    """Reading it anywhere else is an error."""

    def __init__(self, rows, rank, fails_at=None):
        self.rows, self.rank, self.fails_at = rows, rank, fails_at

    def __iter__(self):
        assert self.rank == 0
        for row in range(self.rows):
            if row == self.fails_at:
                raise OSError("the disk is gone")
            yield row


def dispatching(**config):
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True, **config))


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(1, 40), ranks=st.integers(1, 6), even=st.booleans())
def test_the_last_group_is_dealt_out_with_as_few_copies_as_can_be(rows, ranks, even):
    bounds = part_bounds(rows, ranks, even=even)
    hands = [list(range(first, end)) for first, end in bounds]
    assert [row for hand in hands for row in hand][:rows] == list(range(rows))
    if even:
        assert len(set(map(len, hands))) == 1
        assert bounds[-1][1] - rows < ranks
    else:
        assert sum(map(len, hands)) == rows


@pytest.mark.contract("training: rows dispatched from rank 0")
def test_every_row_is_gathered_once_and_in_order(run_ranks):
    def evaluate():
        torch.set_num_threads(1)
        found = {}
        for split, drop_last, rows, size in itertools.product((False, True), (False, True), (1, 7, 12, 23), (2, 6)):
            accelerator = dispatching(split_batches=split)
            if split and size % accelerator.num_processes:
                continue
            data = OnlyOnRankZero(rows, accelerator.process_index)
            loader = accelerator.prepare(DataLoader(data, batch_size=size, drop_last=drop_last))
            assert isinstance(loader, DataLoaderDispatcher)
            sizes, got, ends = [], [], []
            for batch in loader:
                sizes.append(len(batch))
                ends.append(loader.end_of_dataloader)
                got += accelerator.gather_for_metrics(batch).tolist()
            group = size if split else size * accelerator.num_processes
            kept = rows - rows % group if drop_last else rows
            assert got == list(range(kept)), (split, drop_last, rows, size, got)
            assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)
            found[split, drop_last, rows, size] = sizes
        return found

    for world_size in (2, 3):
        all_sizes = run_ranks(evaluate, world_size=world_size)
        assert all(sizes == all_sizes[0] for sizes in all_sizes)  # all ranks get equally many rows


def test_batches_of_any_structure_arrive_as_they_were(run_ranks):
    def receive():
        accelerator = dispatching()

        def batch_of(rows):
            numbers = torch.tensor(rows)
            return Encoding(
                pair=Pair(numbers[:, None].expand(-1, 3).to(torch.float16), (numbers, numbers > 2)),
                texts=[f"row {row}" for row in rows],
                scale=torch.tensor(2.5),
                name="same for all",
                odd=torch.zeros(len(rows), 3, dtype=torch.uint8),
                nothing=None,
            )

        loader = accelerator.prepare(DataLoader(range(7), batch_size=2, collate_fn=batch_of))
        return [
            (
                type(batch).__name__,
                type(batch["pair"]).__name__,
                batch["pair"].inputs.tolist(),
                batch["pair"].inputs.dtype == torch.float16,
                batch["pair"].numbers[1].tolist(),
                batch["texts"],
                batch["scale"].item(),
                batch["name"],
                tuple(batch["odd"].shape),
                batch["nothing"],
            )
            for batch in loader
        ]

    def expected(rows):
        inputs = [[float(row)] * 3 for row in rows]
        texts = [f"row {row}" for row in rows]
        bigger = [row > 2 for row in rows]
        return ("Encoding", "Pair", inputs, True, bigger, texts, 2.5, "same for all", (len(rows), 3), None)

    # The scale may be a mean over the batch, so that rows of two batches are not joined.
    assert run_ranks(receive) == [
        [expected([0, 1]), expected([4, 5])],
        [expected([2, 3]), expected([6])],
    ]


def test_batches_of_different_shapes_are_sent_as_they_come(run_ranks):
    def receive():
        accelerator = dispatching()
        loader = DataLoader(range(8), batch_size=1, collate_fn=lambda rows: torch.full((1, rows[0] + 1), rows[0]))
        return [tuple(batch.shape) for batch in accelerator.prepare(loader)]

    assert run_ranks(receive) == [[(1, 1), (1, 3), (1, 5), (1, 7)], [(1, 2), (1, 4), (1, 6), (1, 8)]]


def test_ranks_may_end_apart_when_asked_to(run_ranks):
    def receive():
        accelerator = dispatching(even_batches=False)
        return [[b.tolist() for b in accelerator.prepare(DataLoader(range(rows), batch_size=2))] for rows in (5, 7)]

    assert run_ranks(receive) == [[[[0, 1], [4]], [[0, 1], [4, 5]]], [[[2, 3]], [[2, 3], [6]]]]


def test_a_slice_function_of_the_users_cuts_the_batches(run_ranks):
    def receive():
        accelerator = dispatching(split_batches=True)

        def interleaved(batch, tensor_slice, process_index, num_processes):
            assert tensor_slice.stop - tensor_slice.start == 2
            return batch[process_index::num_processes]

        loader = accelerator.prepare_data_loader(DataLoader(range(8), batch_size=4), slice_fn_for_dispatch=interleaved)
        return [batch.tolist() for batch in loader]

    assert run_ranks(receive) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_batches_without_rows_that_can_be_counted_are_not_split_into_nothing(run_ranks):
    def read(split_batches):
        accelerator = dispatching(split_batches=split_batches)
        loader = DataLoader([{"text": f"row {row}"} for row in range(4)], batch_size=None)
        try:
            return [batch["text"] for batch in accelerator.prepare(loader)]
        except (ConfigError, DispatchError) as error:
            return str(error)

    assert run_ranks(read, False) == [["row 0", "row 2"], ["row 1", "row 3"]]
    for said in run_ranks(read, True):
        assert re.search("nothing with one entry.*split_batches=False", said)


def test_a_failure_to_read_reaches_every_rank(run_ranks):
    def read(fails_at):
        accelerator = dispatching()
        data = OnlyOnRankZero(12, accelerator.process_index, fails_at)
        got = []
        try:
            for batch in accelerator.prepare(DataLoader(data, batch_size=2)):
                got += [batch.tolist()]
        except (OSError, DispatchError) as error:
            return got, type(error).__name__, str(error)
        return None

    for fails_at in (0, 9):
        first, second = run_ranks(read, fails_at)
        assert first[1:] == ("OSError", "the disk is gone")
        assert second[1:] == (
            "DispatchError",
            "Rank 0, which reads the data for all ranks (dispatch_batches=True), failed: OSError: the disk is gone",
        )
        assert len(first[0]) == len(second[0])


def test_a_loop_that_is_left_early_starts_anew(run_ranks):
    def read():
        accelerator = dispatching()
        loader = accelerator.prepare(DataLoader(range(12), batch_size=2))
        for _ in loader:
            break
        return [batch.tolist() for batch in loader]

    assert run_ranks(read) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]


def test_a_batch_takes_one_collective(run_ranks):
    def count():
        from nb_accelerate.training.comm import TorchCollectives

        calls = []
        for name in ("scatter", "broadcast_objects", "broadcast", "all_gather", "all_gather_object"):
            whole = getattr(TorchCollectives, name)
            setattr(
                TorchCollectives,
                name,
                lambda self, *args, whole=whole, name=name: calls.append(name) or whole(self, *args),
            )
        for _ in dispatching().prepare(DataLoader(range(40), batch_size=2)):
            pass
        return calls

    assert run_ranks(count) == [["broadcast_objects", *["scatter"] * 10]] * 2


def test_shuffling_is_that_of_rank_zero(run_ranks):
    def order():
        accelerator = dispatching()
        torch.manual_seed(accelerator.process_index)
        loader = accelerator.prepare(DataLoader(range(16), batch_size=2, shuffle=True))
        return [row for _ in range(2) for batch in loader for row in accelerator.gather(batch).tolist()]

    torch.manual_seed(0)
    plain = DataLoader(range(16), batch_size=4, shuffle=True)
    expected = [row for _ in range(2) for batch in plain for row in batch.tolist()]
    assert run_ranks(order) == [expected, expected]


def test_the_default_and_false_read_on_every_rank(run_ranks):
    def kinds():
        class Rows(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return index

        names = []
        for dispatch in (None, False, True):
            accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
            assert accelerator.dispatch_batches is dispatch
            loader = accelerator.prepare(DataLoader(Rows(), batch_size=2))
            names.append(type(loader).__name__)
            assert loader.total_batch_size == 2 * accelerator.num_processes
        return names

    assert run_ranks(kinds) == [["DataLoaderShard", "DataLoaderShard", "DataLoaderDispatcher"]] * 2
    assert kinds() == ["DataLoaderShard"] * 3  # one process reads its own data anyway


def test_batches_that_cannot_be_joined_for_a_slice_function_are_refused_at_the_first(run_ranks):
    def read():
        def cut(batch, tensor_slice, **_):
            return batch[tensor_slice]

        loader = DataLoader(range(8), batch_size=1, collate_fn=lambda rows: torch.ones(1, rows[0] + 1))
        try:
            for _ in dispatching().prepare_data_loader(loader, slice_fn_for_dispatch=cut):
                raise AssertionError
        except (ConfigError, DispatchError) as error:
            return str(error)

    for text in run_ranks(read):
        assert "slice_fn_for_dispatch gets the batches" in text


def test_packed_batches_hold_any_tensors():
    tensors = [
        torch.ones(3, dtype=torch.bool),
        torch.tensor(4.0, dtype=torch.float64),
        torch.empty(0, 2),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([1 + 2j]),
    ]
    batch = {"tensors": tensors, "again": tensors[0], "text": "x"}
    layout, inside = pack(batch)
    buffer = torch.empty(layout.size, dtype=torch.uint8)
    write(layout, inside, buffer)
    arrived = unpack(layout, buffer)
    assert arrived["text"] == "x"
    for one, other in zip([*tensors, tensors[0]], [*arrived["tensors"], arrived["again"]], strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


def test_arrays_travel_like_tensors():
    def arrive(arrays):
        layout, tensors = pack(arrays)
        buffer = torch.empty(layout.size, dtype=torch.uint8)
        write(layout, tensors, buffer)
        return layout, unpack(layout, buffer)

    fixed = np.arange(3)
    fixed.flags.writeable = False
    arrays = [
        fixed,
        np.arange(6.0)[::-2],
        np.array(2.5),
        np.empty((0, 2), dtype=np.float16),
        np.array(["a", "bcd"]),
        np.array([{"x": 1}, None]),
        np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
    ]
    layout, arrived = arrive(arrays)
    for one, other in zip(arrays, arrived, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert (one == other).all()
    arrays[1] = arrays[1] + 1.0
    assert arrive(arrays)[0] == layout  # numbers are not in it, so that it is sent once


def test_tensors_come_back_to_where_they_were_if_batches_are_not_to_be_moved():
    class Recorded(torch.Tensor):
        """Bytes on a device, as far as one can tell: brought back by what is asked of them."""

        def cpu(self):
            brought.append(tuple(self.shape))
            return super().cpu()

    batch = {"of the CPU": torch.arange(3.0), "elsewhere": torch.ones(2, 2)}
    layout, tensors = pack(batch)
    layout = replace(layout, slots=(layout.slots[0], replace(layout.slots[1], was_on_cpu=False)))
    buffer = torch.zeros(layout.size, dtype=torch.uint8)
    write(layout, tensors, buffer)
    for bring_back, expected in ((True, [(3,)]), (False, [])):
        brought = []
        arrived = unpack(layout, buffer.as_subclass(Recorded), bring_back=bring_back)
        assert brought == expected
        assert [arrived[name].tolist() for name in batch] == [tensor.tolist() for tensor in tensors]


def test_datapipes_are_refused_on_several_ranks(run_ranks):
    def prepare():
        from torch.utils.data.datapipes.iter import IterableWrapper

        with pytest.raises(ConfigError, match="of IterableDataset"):
            Accelerator(cpu=True).prepare(DataLoader(IterableWrapper(range(11)), batch_size=2))

    run_ranks(prepare)
