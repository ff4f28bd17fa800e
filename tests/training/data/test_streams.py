"""Streams on several ranks: who reads them, that no row is lost or doubled, and that reading is taken up again."""

from __future__ import annotations

import functools
import itertools
import operator
import random
import re

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.data_loader import SkipDataLoader
from nb_accelerate.errors import ConfigError, DispatchError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.data import skip_first_batches


class Stream(IterableDataset):
    def __init__(self, rows=23):
        self.rows = rows

    def __iter__(self):
        return iter(range(self.rows))


class Shuffling(IterableDataset):
    """In another order on each rank, as one is that shuffles with numbers of the process, or reads from a socket."""

    def __iter__(self):
        rows = list(range(24))
        random.shuffle(rows)
        return iter(rows)


class Sharded(IterableDataset):
    """A stream of some files that shards itself, and knows where it is."""

    def __init__(self, files, index=0, num=1, fails_at=None):
        self.files = files
        self.mine = files[index::num]
        self.index, self.num, self.fails_at = index, num, fails_at
        self.reads = 0
        self.at = 0

    @property
    def num_shards(self):
        return len(self.mine)

    def shard(self, num_shards, index):
        return Sharded(self.files, index, num_shards, self.fails_at)

    def __iter__(self):
        worker = get_worker_info()
        step, first = (worker.num_workers, worker.id) if worker else (1, 0)
        rows = [row for file in self.mine[first::step] for row in file]
        while self.at < len(rows):
            self.at += 1
            self.reads += 1
            if rows[self.at - 1] == self.fails_at:
                raise OSError("the disk is gone")
            yield rows[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def files(*sizes):
    numbers = itertools.count()
    return [list(itertools.islice(numbers, size)) for size in sizes]


def prepared(loader, **config):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    return accelerator, accelerator.prepare(loader)


def lists(loader):
    return [batch.tolist() for batch in loader]


def test_a_stream_that_differs_between_ranks_is_handed_out_once(run_ranks):
    def read():
        random.seed(Accelerator(cpu=True).process_index)
        _, loader = prepared(DataLoader(Shuffling(), batch_size=3))
        return [type(loader).__name__, *lists(loader)]

    first, second = run_ranks(read)
    assert first[0] == second[0] == "DataLoaderDispatcher"
    assert sorted(functools.reduce(operator.iadd, first[1:] + second[1:], [])) == list(range(24))


def test_batches_without_a_tensor_and_lists_of_samples_are_dealt_out_by_row(run_ranks):
    def read():
        def samples(rows):  # as detection models take them
            return tuple(
                zip(*[(torch.full((3, row + 1), row), {"boxes": torch.ones(row, 4)}) for row in rows], strict=False)
            )

        found = []
        for rows in (7, 8, 5):
            _, loader = prepared(
                DataLoader(Stream(rows), batch_size=2, collate_fn=lambda rows: {"texts": list(map(str, rows))})
            )
            found.append([batch["texts"] for batch in loader])
            _, loader = prepared(DataLoader(Stream(rows), batch_size=2, collate_fn=samples))
            found.append(
                [
                    [(len(boxes["boxes"]), image.shape[1] - 1) for image, boxes in zip(*batch, strict=False)]
                    for batch in loader
                ]
            )
            _, loader = prepared(DataLoader(Stream(rows), batch_size=None, collate_fn=lambda row: {"text": str(row)}))
            found.append([batch["text"] for batch in loader])
        return found

    def as_samples(texts):
        return [[(int(text), int(text)) for text in batch] for batch in texts]

    seven = [["0", "1"], ["4", "5"]], [["2", "3"], ["6", "0"]]
    eight = [["0", "1"], ["4", "5"]], [["2", "3"], ["6", "7"]]
    five = [["0", "1"], ["4"]], [["2", "3"], ["0"]]
    whole = ["0", "2", "4", "6"], ["1", "3", "5", "0"]
    for rank, found in enumerate(run_ranks(read)):
        assert found[:3] == [seven[rank], as_samples(seven[rank]), whole[rank]]
        assert found[3:6] == [eight[rank], as_samples(eight[rank]), whole[rank] if rank == 0 else ["1", "3", "5", "7"]]
        assert found[6:] == [five[rank], as_samples(five[rank]), ["0", "2", "4"] if rank == 0 else ["1", "3", "0"]]


def test_what_was_skipped_before_prepare_is_shared_out_like_all_else(run_ranks):
    kinds = {
        "rows": lambda: DataLoader(range(23), batch_size=3),
        "shuffled": lambda: DataLoader(range(23), 3, shuffle=True, generator=torch.Generator().manual_seed(2)),
        "stream": lambda: DataLoader(Stream(), batch_size=3),
        "sharded": lambda: DataLoader(Sharded(files(6, 6, 6, 5)), batch_size=3),
    }

    def gathered(loader, **config):
        accelerator, loader = prepared(loader, **config)
        return [row for batch in loader for row in accelerator.gather_for_metrics(batch).tolist()]

    def read():
        found = {}
        configs = [{}, {"dispatch_batches": True}, {"dispatch_batches": False}]
        for make, config in itertools.product(kinds.values(), configs):
            with pytest.raises(ConfigError, match=r"first 3 batches.*skip_first_batches\(accelerator\.prepare.*, 1\)"):
                prepared(skip_first_batches(make(), 3), **config)
        for (name, make), config, skip in itertools.product(kinds.items(), configs, (2, 8)):
            found[name, str(config), skip] = gathered(skip_first_batches(make(), skip), **config)
            plain = make()
            options = {"sampler": plain.sampler, "generator": plain.generator} if name == "shuffled" else {}
            by_hand = SkipDataLoader(plain.dataset, skip_batches=skip, batch_size=3, **options)
            assert gathered(by_hand, **config) == found[name, str(config), skip], (name, config, skip)
        return found

    order = [row for batch in kinds["shuffled"]() for row in batch.tolist()]
    first, second = run_ranks(read, deadline=55)
    assert first == second
    for (name, config, skip), rows in first.items():
        if name == "sharded" and "True" not in config:  # each rank leaves out its part of them
            assert len(rows) == len(set(rows)) == 23 - 3 * skip or skip == 8, (name, config, skip, rows)
        else:
            assert rows == (order if name == "shuffled" else list(range(23)))[3 * skip :], (name, config, skip)


@pytest.mark.slow
def test_each_rank_reads_its_own_shards_and_no_row_is_lost(run_ranks):
    cases = [
        {"sizes": sizes, "size": size, "drop": drop, "split": split, "workers": 0}
        for sizes, size, drop, split in itertools.product(
            [(6, 6), (5, 12, 1, 9), (3, 0, 20), (0, 1), (0, 0)], (4,), (False, True), (False, True)
        )
    ]
    cases += [{"sizes": (9, 5, 8, 4), "size": 2, "drop": drop, "split": False, "workers": 2} for drop in (False, True)]

    def read():
        found = []
        for case in cases:
            data = Sharded(files(*case["sizes"]))
            loader = DataLoader(data, case["size"], drop_last=case["drop"], num_workers=case["workers"])
            accelerator, loader = prepared(loader, split_batches=case["split"])
            for _ in range(1 if case["workers"] else 2):
                mine, all_rows = [], []
                for batch in loader:
                    mine.append(len(batch))
                    all_rows += accelerator.gather_for_metrics(batch).tolist()
            found.append((type(loader._reader).__name__, mine, sorted(all_rows), loader.dataset.reads))
        return found

    for case, *ranks in zip(cases, *run_ranks(read, deadline=55), strict=True):
        total = sum(case["sizes"])
        group = case["size"] if case["split"] else 2 * case["size"]
        assert ranks[0][1] == ranks[1][1], case  # equally many batches, equally large
        assert ranks[0][2] == ranks[1][2], case
        if case["drop"] and not case["workers"]:
            assert len(set(ranks[0][2])) == len(ranks[0][2]) == total - total % group, case
        elif not case["drop"]:
            assert ranks[0][2] == list(range(total)), case
        for rank, (kind, _, _, reads) in enumerate(ranks):
            assert kind == "StreamReader", case
            assert reads <= 2 * sum(case["sizes"][rank::2]), case


def test_items_of_a_stream_that_shards_itself_stay_whole(run_ranks):
    def read():
        class Items(Sharded):
            def __iter__(self):
                return ({"text": f"row {row}", "x": torch.full((2,), row)} for row in super().__iter__())

            def shard(self, num_shards, index):
                return Items(self.files, index, num_shards)

        accelerator, loader = prepared(DataLoader(Items(files(3, 6)), batch_size=None))
        return [(b["text"], accelerator.gather_for_metrics(b["x"]).tolist()[::2]) for b in loader]

    first, second = run_ranks(read)
    assert [text for text, _ in first] == ["row 0", "row 1", "row 2", "row 6", "row 8"]
    assert [text for text, _ in second] == ["row 3", "row 4", "row 5", "row 7", "row 8"]
    assert sorted(functools.reduce(operator.iadd, (rows for _, rows in first), [])) == list(range(9))


def test_ranks_end_with_their_own_shards_when_asked_to(run_ranks):
    def read():
        _, loader = prepared(DataLoader(Sharded(files(5, 2)), batch_size=2), even_batches=False)
        return lists(loader)

    assert run_ranks(read) == [[[0, 1], [2, 3], [4]], [[5, 6]]]


def test_a_failure_in_one_part_reaches_every_rank(run_ranks):
    def read():
        _, loader = prepared(DataLoader(Sharded(files(8, 8), fails_at=13), batch_size=2))
        try:
            return lists(loader)
        except (OSError, DispatchError) as error:
            return f"{type(error).__name__}: {error}"

    first, second = run_ranks(read)
    assert second.startswith("OSError: the disk")
    assert re.fullmatch(rf"DispatchError: Rank 1\b.*: {second}", first)


def test_a_stream_that_shards_itself_goes_on_from_every_position(run_ranks):
    def resume(stateful):
        def make():
            # The part of rank 0 is the shorter one, so what rank 1 has more is dealt out at the end.
            loader = DataLoader(Sharded(files(5, 14, 4, 6)), batch_size=3)
            return prepared(loader, use_stateful_dataloader=stateful)[1]

        whole = make()
        epochs = [lists(whole), lists(whole)]
        for stop in range(len(epochs[0])):
            loader = make()
            for number, _ in enumerate(loader):
                if number == stop:
                    state = loader.state_dict()
                    break
            again = make()
            again.load_state_dict(state)
            assert again.state_dict() == state
            expected = epochs[0][stop + 1 :] or epochs[1]
            assert lists(again) == expected, (stop, state)
            assert lists(again) == epochs[1], stop
            if stop:  # of a loader that leaves out the beginning, which is not left out again
                rest = skip_first_batches(make(), 1)
                rest.load_state_dict(state)
                assert lists(rest) == (epochs[0][stop + 1 :] or epochs[1][1:]), stop
            if stateful and stop < 2:
                assert again.dataset.reads <= 2 * sum(map(len, again.dataset.mine)) - 3 * (stop + 1)
        return {row for batch in epochs[0] for row in batch}

    for stateful in (False, True):
        parts = run_ranks(resume, stateful, deadline=55)
        assert set.union(*parts) == set(range(29))


@pytest.mark.slow
def test_datasets_of_hugging_face_are_read_shard_by_shard_where_ranks_agree_on_their_order(run_ranks):
    pytest.importorskip("datasets")

    def read():
        import datasets
        from datasets.distributed import split_dataset_by_node

        rank = Accelerator(cpu=True).process_index
        rows = datasets.Dataset.from_dict({"a": list(range(22))})
        found = {}

        def gathered(stream, epochs=1, **config):
            accelerator, loader = prepared(DataLoader(stream, batch_size=3), **config)
            rows = [
                sorted(row for batch in loader for row in accelerator.gather_for_metrics(batch["a"]).tolist())
                for _ in range(epochs)
            ]
            assert all(epoch == list(range(22)) for epoch in rows), rows
            return type(loader._reader).__name__

        stream = rows.to_iterable_dataset(num_shards=4)
        found["plain"] = gathered(stream)
        found["seeded"] = gathered(stream.shuffle(seed=3, buffer_size=5), epochs=2)
        found["mapped"] = gathered(stream.map(lambda row: row).shuffle(seed=3, buffer_size=5))
        found["unseeded"] = gathered(stream.shuffle(buffer_size=5))
        found["one shard"] = gathered(rows.to_iterable_dataset(num_shards=1))
        found["dispatched"] = gathered(stream, dispatch_batches=True)
        found["split"] = gathered(split_dataset_by_node(stream, rank, 2))
        for name, wrong in {
            "other": split_dataset_by_node(stream, 0, 4),
            "no seed": stream.shuffle(buffer_size=5),
            "split, no seed": split_dataset_by_node(stream.shuffle(buffer_size=5), rank, 2),
        }.items():
            try:
                gathered(wrong, dispatch_batches=False)
            except ConfigError as error:
                found[name] = str(error)

        def make():
            loader = DataLoader(stream.shuffle(seed=1, buffer_size=1), batch_size=3)
            return prepared(loader, use_stateful_dataloader=True)[1]

        whole = [batch["a"].tolist() for batch in make()]
        for stop in range(len(whole) - 1):
            loader = make()
            for _ in itertools.islice(loader, stop + 1):
                state = loader.state_dict()
            again = make()
            again.load_state_dict(state)
            assert [batch["a"].tolist() for batch in again] == whole[stop + 1 :]
        with Accelerator(cpu=True).split_between_processes(rows, apply_padding=True) as part:
            return found | {"between": list(part["a"])}

    for rank, found in enumerate(run_ranks(read, deadline=55)):
        own, dealt = "StreamReader", "DispatchingReader"
        assert {name: found[name] for name in ("plain", "seeded", "mapped", "split")} == dict.fromkeys(
            ("plain", "seeded", "mapped", "split"), own
        )
        assert {found[name] for name in ("unseeded", "one shard", "dispatched")} == {dealt}
        assert "Leave split_dataset_by_node out" in found["other"]
        assert "shuffle(seed=42)" in found["no seed"]
        assert found["split, no seed"] == found["no seed"]
        assert found["between"] == list(range(11 * rank, 11 * rank + 11))


def test_a_checkpoint_says_for_each_rank_where_it_is_in_its_own_shards(run_ranks, tmp_path):
    def resume(folder):
        def make():
            config = DataLoaderConfiguration(use_stateful_dataloader=True)
            accelerator = Accelerator(cpu=True, dataloader_config=config)
            return accelerator, accelerator.prepare(DataLoader(Sharded(files(5, 14, 4, 6)), batch_size=3))

        accelerator, loader = make()
        rest = []
        for number, batch in enumerate(loader):
            if number > 3:  # rank 0 has read all its rows by now
                rest.append(batch.tolist())
            if number == 3:
                accelerator.save_state(folder)
        accelerator, loader = make()
        accelerator.load_state(folder)
        assert lists(loader) == rest
        return len(rest)

    assert run_ranks(resume, str(tmp_path)) == [1, 1]
