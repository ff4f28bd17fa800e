"""Prepared loaders: the same rows as before, at the right place, and exact at the end."""

from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from collections import UserDict, namedtuple

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.data_loader import DataLoaderShard, IterableDatasetShard, SeedableRandomSampler
from nb_accelerate.errors import CollectiveMismatchError, ConfigError
from nb_accelerate.training.accelerator import Accelerator

Pair = namedtuple("Pair", ["inputs", "numbers"])


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(range(self.rows))


class Rows(Dataset):
    """Fetches many rows at once."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.tensor(index)


class Buckets:
    """A batch sampler of the user's own, with a short batch in the middle of nowhere."""

    batch_size = 4
    drop_last = False

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        for first in range(0, self.rows, 4):
            yield list(range(first, min(first + 4, self.rows)))

    def __len__(self):
        return (self.rows + 3) // 4


@pytest.mark.contract("training: rows are dealt to ranks")
def test_evaluation_gathers_every_row_once_and_in_order_for_awkward_sizes(run_ranks):
    def evaluate():
        torch.set_num_threads(1)
        found = {}
        for split in (False, True):
            accelerator = Accelerator(cpu=True, split_batches=split)
            for rows, batch_size in [(36, 5), (36, 16), (36, 36), (36, 100), (35, 8), (37, 2), (1, 6), (3, 8)]:
                ranks = accelerator.num_processes
                size = max(ranks, batch_size - batch_size % ranks) if split else batch_size
                numbers = torch.arange(rows)
                loader = accelerator.prepare(DataLoader(TensorDataset(numbers.float(), numbers), batch_size=size))
                tensors, objects = [], []
                for inputs, targets in loader:
                    pair = accelerator.gather_for_metrics(Pair(inputs, {"n": targets}))
                    assert torch.equal(pair.inputs.long(), pair.numbers["n"])
                    tensors += pair.inputs.long().tolist()
                    objects += accelerator.gather_for_metrics([str(number) for number in targets.tolist()])
                found[split, rows, batch_size] = (
                    tensors == list(range(rows)),
                    objects == [str(number) for number in range(rows)],
                )
        return found

    for world_size in (2, 3):
        for found in run_ranks(evaluate, world_size=world_size):
            assert len(found) == 16
            assert all(value == (True, True) for value in found.values()), found


def test_every_kind_of_loader_is_gathered_exactly(run_ranks):
    def rows_of(make, config=None):
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        loader = accelerator.prepare(make())
        got = [row for batch in loader for row in accelerator.gather_for_metrics(batch).tolist()]
        return got, len(loader) if not isinstance(loader.dataset, IterableDataset) else None

    def all_kinds():
        torch.set_num_threads(1)
        return {
            "stream": rows_of(lambda: DataLoader(Stream(23), batch_size=4))[0],
            "stream in a worker": rows_of(lambda: DataLoader(Stream(23), batch_size=4, num_workers=1))[0],
            "stream of batches": rows_of(
                lambda: DataLoader(Stream(7), batch_size=None, collate_fn=lambda row: torch.tensor([row, row]))
            )[0],
            "stream without an end": rows_of(lambda: DataLoader(Stream(23), batch_size=4, drop_last=True))[0],
            "workers": rows_of(
                lambda: DataLoader(Rows(), batch_size=4, num_workers=2, persistent_workers=True, prefetch_factor=1)
            )[0],
            "own batch sampler": rows_of(lambda: DataLoader(Rows(), batch_sampler=Buckets(23)))[0],
            "sampler that is a batch sampler": rows_of(
                lambda: DataLoader(
                    torch.arange(23), batch_size=None, sampler=BatchSampler(SequentialSampler(range(23)), 4, False)
                )
            )[0],
            "items that are batches": rows_of(
                lambda: DataLoader(torch.arange(23)[:, None], batch_size=None, sampler=range(23))
            )[0],
            "half of the rows": sorted(
                rows_of(lambda: DataLoader(Rows(), batch_size=4, sampler=SubsetRandomSampler(range(11))))[0]
            ),
        }

    expected = {
        "stream": list(range(23)),
        "stream in a worker": list(range(23)),
        "stream of batches": [row for number in range(7) for row in (number, number)],
        "stream without an end": list(range(16)),
        "workers": list(range(23)),
        "own batch sampler": list(range(23)),
        "sampler that is a batch sampler": list(range(23)),
        "items that are batches": list(range(23)),
        "half of the rows": list(range(11)),
    }
    assert run_ranks(all_kinds) == [expected, expected]


class WithoutLength:
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_a_loader_whose_ranks_will_differ_in_rows_is_refused_by_gather_for_metrics_at_the_first_batch(run_ranks):
    def ask():
        uneven = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
        for batch in uneven.prepare(DataLoader(range(16), batch_size=4)):
            uneven.gather_for_metrics(batch)  # all are full

        class Stream(IterableDataset):
            def __iter__(self):
                return iter(range(25))

        class Sized(Stream):
            def __len__(self):
                return 25

        unsized = BatchSampler(WithoutLength(range(25)), 4, drop_last=False)
        found = []
        for loader, dispatch in (
            (DataLoader(range(13), batch_size=4), False),
            (DataLoader(range(13), batch_size=4), True),
            (DataLoader(range(25), batch_sampler=unsized), False),
            (DataLoader(Stream(), batch_size=4), False),
            (DataLoader(Stream(), batch_size=4), True),
            (DataLoader(Sized(), batch_size=4), False),
            (DataLoader(Sized(), batch_size=4), True),
        ):
            uneven.dataloader_config = DataLoaderConfiguration(even_batches=False, dispatch_batches=dispatch)
            for number, batch in enumerate(uneven.prepare(loader)):
                try:
                    uneven.gather_for_metrics(batch)
                except ValueError as error:
                    found.append((number, "even_batches=True" in str(error)))
                    break
        return found

    assert run_ranks(ask) == 2 * [[(0, True)] * 7]


def test_gather_for_metrics_returns_single_values_of_all_processes_and_warns_where_rows_are_repeated(run_ranks):
    def ask():
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(range(9), batch_size=4))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [
                [one.tolist() for one in accelerator.gather_for_metrics((batch, batch.double().mean()))]
                for batch in loader
            ]
        return found, [str(one.message) for one in caught]

    (found, said), (_, silent) = run_ranks(ask)
    assert found[0] == [[0, 1, 2, 3, 4, 5, 6, 7], [1.5, 5.5]]
    assert found[1][0] == [8]
    assert len(found[1][1]) == 2
    assert len(said) == 1
    assert "1 of all" in said[0]
    assert silent == []


def test_shuffling_is_alike_on_all_ranks_for_every_source_of_randomness(run_ranks):
    def orders():
        accelerator = Accelerator(cpu=True)
        rank = accelerator.process_index
        seeded = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
        )
        torch.manual_seed(rank)
        generator = torch.Generator().manual_seed(100 + rank)
        loaders = [
            accelerator.prepare(DataLoader(range(16), batch_size=2, shuffle=True)),
            accelerator.prepare(DataLoader(range(16), batch_size=2, shuffle=True, generator=generator)),
            accelerator.prepare(DataLoader(range(16), batch_size=2, sampler=SubsetRandomSampler(range(16)))),
            accelerator.prepare(DataLoader(range(16), batch_sampler=BatchSampler(RandomSampler(range(16)), 2, False))),
            seeded.prepare(DataLoader(range(16), batch_size=2, shuffle=True)),
        ]
        return [
            [[row for batch in loader for row in accelerator.gather(batch).tolist()] for loader in loaders]
            for _ in range(2)
        ]

    first, second = run_ranks(orders)
    assert first == second
    for epoch in first:
        for order in epoch:
            assert sorted(order) == list(range(16))
    assert all(one != other for one, other in zip(*first, strict=True))  # epochs differ


def test_one_process_sees_what_plain_pytorch_would_see():
    for seed in range(3):
        orders = []
        for prepare in (lambda loader: loader, Accelerator(cpu=True).prepare):
            torch.manual_seed(seed)
            loader = prepare(DataLoader(range(10), batch_size=3, shuffle=True))
            orders.append([batch.tolist() for _ in range(2) for batch in loader] + [torch.rand(1).item()])
        assert orders[0] == orders[1]


def test_the_last_batch_is_known_while_it_is_used():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(7), batch_size=3))
    assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    assert [accelerator.core.loops.end_of_dataloader for _ in loader] == [False, False, True]
    assert accelerator.core.loops.active is None


def test_a_loop_that_is_left_early_is_forgotten():
    accelerator = Accelerator(cpu=True)
    outer, inner = (accelerator.prepare(DataLoader(range(9), batch_size=3)) for _ in range(2))
    for _ in outer:
        for _ in inner:
            assert accelerator.core.loops.active.loader is inner
            break
        gc.collect()
        assert accelerator.core.loops.active.loader is outer
    assert accelerator.core.loops.active is None


def test_settings_of_the_loader_survive():
    def start(_worker):
        """Do nothing in each worker."""

    generator = torch.Generator()
    original = DataLoader(
        Rows(),
        batch_size=4,
        num_workers=1,
        collate_fn=torch.stack,
        timeout=5,
        worker_init_fn=start,
        multiprocessing_context="fork",
        generator=generator,
        prefetch_factor=3,
        persistent_workers=True,
    )
    prepared = Accelerator(cpu=True).prepare(original)
    kept = ["num_workers", "collate_fn", "timeout", "worker_init_fn", "multiprocessing_context", "generator"]
    for name in [*kept, "prefetch_factor", "persistent_workers", "pin_memory", "dataset", "drop_last"]:
        assert getattr(prepared, name) == getattr(original, name), name
    assert Accelerator(cpu=True).prepare(prepared) is prepared


def test_lengths_and_batch_sizes_are_those_of_all_ranks(run_ranks):
    def measure():
        found = []
        for split in (False, True):
            loader = Accelerator(cpu=True, split_batches=split).prepare(DataLoader(range(50), batch_size=4))
            found.append((len(loader), loader.total_batch_size, loader.total_dataset_length))
        return found

    assert run_ranks(measure) == [[(7, 8, 50), (13, 4, 50)]] * 2


def test_uneven_ranks_get_different_numbers_of_batches_when_asked_to(run_ranks):
    def measure():
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
        return [batch.tolist() for batch in accelerator.prepare(DataLoader(range(6), batch_size=2))]

    assert run_ranks(measure) == [[[0, 1], [4, 5]], [[2, 3]]]


def test_set_epoch_reaches_samplers_and_datasets():
    class Sampler(SequentialSampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

    sampler = Sampler(range(4))
    Accelerator(cpu=True).prepare(DataLoader(range(4), sampler=sampler)).set_epoch(3)
    assert sampler.epoch == 3


def test_batches_of_any_type_keep_their_type():
    class Encoding(UserDict):
        pass

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(
        DataLoader(range(4), batch_size=2, collate_fn=lambda rows: Encoding(n=torch.tensor(rows)))
    )
    assert [type(batch) for batch in loader] == [Encoding, Encoding]


def test_a_loader_that_is_sharded_already_is_refused(run_ranks):
    def prepare():
        accelerator = Accelerator(cpu=True)
        with pytest.raises(ConfigError, match="part of a part"):
            accelerator.prepare(DataLoader(range(8), sampler=DistributedSampler(range(8))))

    run_ranks(prepare)


def test_a_loader_with_its_own_iteration_is_refused():
    class Special(DataLoader):
        def __iter__(self):
            yield from range(3)

    with pytest.raises(ConfigError, match="Special has an __iter__"):
        Accelerator(cpu=True).prepare(Special(range(3)))


def test_an_empty_loader_has_no_batches():
    loader = Accelerator(cpu=True).prepare(DataLoader(TensorDataset(torch.empty(0, 2)), batch_size=2))
    assert list(loader) == []


def test_a_prepared_model_evaluates_what_was_held_out(run_ranks):
    def evaluate():
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(37, 3), torch.arange(37))
        model, loader = accelerator.prepare(nn.Linear(3, 2), DataLoader(data, batch_size=5))
        model.eval()
        with torch.no_grad():
            outputs = [accelerator.gather_for_metrics((model(inputs), numbers)) for inputs, numbers in loader]
        return torch.cat([out for out, _ in outputs]), torch.cat([numbers for _, numbers in outputs])

    torch.manual_seed(0)
    inputs = torch.randn(37, 3)
    expected = nn.Linear(3, 2)(inputs)
    for outputs, numbers in run_ranks(evaluate):
        assert numbers.tolist() == list(range(37))
        torch.testing.assert_close(outputs, expected.detach(), rtol=0, atol=1e-6)


def texts_of(rows):
    return {"n": torch.tensor(rows), "text": [f"row {row}" for row in rows]}


def test_batches_of_varying_size_are_gathered_exactly(run_ranks):
    def evaluate():
        torch.set_num_threads(1)
        accelerator = Accelerator(cpu=True)
        ranks = accelerator.num_processes
        for sizes in ((3, 1, 4, 2, 5, 3, 2), (2, 5), (4,), (1, 2, 3, 1, 2, 3), (2, 2, 2, 2, 2)):
            ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
            batches = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
            for collate in (None, list, texts_of):
                loader = accelerator.prepare(DataLoader(range(99), batch_sampler=batches, collate_fn=collate))
                assert len(loader) == -(-len(sizes) // ranks)
                objects, padded, count = [], [], 0
                for batch in loader:
                    rows = torch.as_tensor(batch["n"] if isinstance(batch, dict) else batch)
                    objects += accelerator.gather_for_metrics([f"row {row}" for row in rows.tolist()])
                    wide = accelerator.pad_across_processes(rows, pad_index=-1)
                    padded += accelerator.gather_for_metrics(wide).tolist()
                    count += 1
                assert count == len(loader)
                assert objects == [f"row {row}" for row in range(ends[-1])], (sizes, objects)
                assert [row for row in padded if row >= 0] == list(range(ends[-1])), (sizes, padded)

    for world_size in (2, 3):
        run_ranks(evaluate, world_size=world_size)


def test_tensors_of_varying_size_are_refused_in_the_last_round_as_in_all_others(run_ranks):
    def evaluate():
        accelerator = Accelerator(cpu=True)
        errors = []
        for sizes in ((2, 1, 3), (1, 2, 2, 2, 3)):  # the first round, the last one
            ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
            batches = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
            for batch in accelerator.prepare(DataLoader(range(99), batch_sampler=batches)):
                try:
                    accelerator.gather_for_metrics(batch)
                except CollectiveMismatchError as error:
                    errors.append(str(error))
        return errors

    for errors in run_ranks(evaluate):
        assert len(errors) == 4
        assert all("rank 1" in error for error in errors)


def test_loaders_tell_what_is_kept_in_step(run_ranks):
    def tell():
        found = []
        stream = Stream(8)
        stream.generator = torch.Generator()
        for types in (None, ["torch"], ["torch", "generator"]):
            accelerator = Accelerator(cpu=True, rng_types=types)
            for loader in (
                DataLoader(range(8), shuffle=True),
                DataLoader(range(8), batch_size=None, sampler=RandomSampler(range(8))),
                DataLoader(range(8)),
                DataLoader(stream),
            ):
                prepared = accelerator.prepare(loader)
                for one in (prepared, accelerator.skip_first_batches(prepared, 1)):
                    generator = one.synchronized_generator
                    names = [str(kind.value) for kind in one.rng_types]
                    assert (generator is not None) is ("generator" in names)
                    of_source = stream.generator if isinstance(loader.dataset, Stream) else one.get_sampler()
                    assert generator is None or generator is getattr(of_source, "generator", of_source)
                    found.append(names)
        return found[::2] if found[::2] == found[1::2] else None

    def expected(globally):
        with_generator = [*globally, "generator"]
        return [with_generator, with_generator, globally, with_generator]

    both = [*expected([]), *[["torch"]] * 4, *expected(["torch"])]
    assert run_ranks(tell) == [both, both]
    assert tell() == [*[[]] * 4, *[["torch"]] * 8]


def test_a_loader_leads_to_the_state_of_its_accelerator():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(range(4), batch_size=2))
    for state in (loader.gradient_state, accelerator.skip_first_batches(loader, 1).gradient_state):
        assert state.num_steps == 2
        assert not state.in_dataloader
    found = []
    for _ in loader:
        with accelerator.accumulate():
            state = loader.gradient_state
            found.append((state.sync_gradients, state.end_of_dataloader, state.active_dataloader is loader))
    assert found == [(False, False, True), (True, True, True)]
    by_hand = DataLoaderShard(range(4))
    assert [by_hand.gradient_state.dataloader_references for _ in by_hand][0] == [None, by_hand]  # noqa: RUF015
    assert by_hand.gradient_state.dataloader_references == [None]
    assert pickle.loads(pickle.dumps(loader)).gradient_state.num_steps == 2


@pytest.mark.parametrize("stateful", [False, True])
def test_what_is_dropped_in_the_middle_of_a_loop_is_freed_at_once(stateful):
    if stateful:
        pytest.importorskip("torchdata")
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful))
    loader = accelerator.prepare(DataLoader(range(8), batch_size=2))
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    dropped = [weakref.ref(thing) for thing in (accelerator, loader, loader.gradient_state)]
    gc.disable()
    try:
        del accelerator, loader, batches
        assert [reference() for reference in dropped] == [None, None, None]
    finally:
        gc.enable()


def test_leaving_out_batches_leaves_the_epoch_of_samplers_as_it_is():
    sampler = SeedableRandomSampler(range(16))
    loader = DataLoaderShard(range(16), batch_sampler=BatchSampler(sampler, 4, False))
    whole = [[[row.item() for row in batch] for batch in loader] for _ in range(2)]
    loader.set_epoch(1)
    rest = Accelerator(cpu=True).skip_first_batches(loader, 1)
    assert [batch.tolist() for batch in rest] == whole[1][1:]
    loader.set_epoch(1)
    own = DataLoaderShard(range(16), batch_sampler=Told(sampler, 4, False))
    own.set_epoch(1)
    first = next(iter(Accelerator(cpu=True).skip_first_batches(own, 1)))
    assert first.tolist() == whole[1][1]
    assert sampler.epoch == own.batch_sampler.epoch == 1


class Told(BatchSampler):
    """Knows its epoch, as the sampler inside does."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_rows_of_a_shard_made_by_hand_are_the_users():
    shards = [IterableDatasetShard(Stream(9), 2, num_processes=2, process_index=rank) for rank in range(2)]
    assert [list(shard) for shard in shards] == [[0, 1, 4, 5, 8, 0], [2, 3, 6, 7, 1, 2]]
    assert [batch.tolist() for batch in DataLoader(shards[1], batch_size=2)] == [[2, 3], [6, 7], [1, 2]]
