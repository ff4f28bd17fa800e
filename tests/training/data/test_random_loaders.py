"""Loaders put together at random: the rows of each rank against an oracle.

Every case is made from a number, which is printed when something differs: ``Case.of(number)`` is that case again.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fixtures.batch_kinds import KINDS as BATCHES
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.data import skip_first_batches

WORLD = 2
KINDS = (
    *("in order", "shuffled", "loader generator", "sampler generator", "weighted", "seedable", "own sampler"),
    *("stream", "stream", "sized stream", "sharded", "sharded", "datasets", "items", "varying"),
    *("global weighted", "global subset"),
)


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(range(self.rows))


class Sized(Stream):
    def __len__(self):
        return self.rows


class Sharded(IterableDataset):
    def __init__(self, files):
        self.files = files
        self.num_shards = len(files)

    def shard(self, num_shards, index):
        return Sharded(self.files[index::num_shards])

    def __iter__(self):
        return itertools.chain(*self.files)


class Varying:
    """A batch sampler whose batches have no fixed size."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        rows = iter(range(sum(self.sizes)))
        return (list(itertools.islice(rows, size)) for size in self.sizes)


class OwnBatchSampler(BatchSampler):
    """Nothing that could be planned ahead."""


@dataclass(frozen=True)
class Case:
    number: int
    kind: str
    rows: int
    size: int
    drop_last: bool
    split: bool
    even: bool
    dispatch: bool | None
    workers: int
    skip: int
    skip_before: int
    again: str
    files: tuple[int, ...]
    stateful: bool
    batch: str

    @classmethod
    def of(cls, number: int) -> Case:
        draw = random.Random(number)
        size = draw.randint(1, 6)
        again = draw.choice(["", "", "", "same", "other", "state"])
        return cls(
            number=number,
            kind=draw.choice(KINDS),
            rows=draw.choice([draw.randint(1, 8), draw.randint(1, 40)]),
            size=size,
            drop_last=draw.random() < 0.25,
            split=size % WORLD == 0 and draw.random() < 0.4,
            even=draw.random() < 0.8 or again == "state",  # all ranks have to know together whether there is a state
            dispatch=draw.choice([None, None, True, False]),
            workers=int(draw.random() < 0.02),
            skip=draw.choice([0, 0, 0, 1, 2, 5]),
            skip_before=draw.choice([0, 0, 0, 0, WORLD, 2 * WORLD]),
            again=again,
            files=tuple(draw.randint(1, 12) for _ in range(draw.randint(2, 5))),
            stateful=draw.random() < 0.1,
            batch=draw.choice([*["tensor"] * len(BATCHES), *BATCHES]),
        )

    @property
    def dispatched(self) -> bool:
        streams = self.kind in ("stream", "sized stream")
        return self.dispatch is True or (self.dispatch is None and streams)

    @property
    def native(self) -> bool:
        return self.kind in ("sharded", "datasets") and self.dispatch is not True

    def loader(self) -> DataLoader[Any]:
        batches = {"batch_size": self.size, "drop_last": self.drop_last, "num_workers": self.workers}
        if self.has_kind:
            batches["collate_fn"] = BATCHES[self.batch].make
        generator = torch.Generator().manual_seed(self.number)
        data = Rows(self.rows)
        if self.kind in ("shuffled", "seedable"):
            return DataLoader(data, shuffle=True, **batches)
        if self.kind == "loader generator":
            return DataLoader(data, shuffle=True, generator=generator, **batches)
        if self.kind == "sampler generator":
            return DataLoader(data, sampler=RandomSampler(data, generator=generator), **batches)
        if self.kind == "weighted":
            return DataLoader(data, sampler=WeightedRandomSampler([1.0] * 9, self.rows, generator=generator), **batches)
        if self.kind == "global weighted":
            return DataLoader(data, sampler=WeightedRandomSampler([1.0] * 9, self.rows), **batches)
        if self.kind == "global subset":
            return DataLoader(data, sampler=SubsetRandomSampler(range(self.rows)), **batches)
        if self.kind == "own sampler":
            sampler = OwnBatchSampler(RandomSampler(data, generator=generator), self.size, self.drop_last)
            return DataLoader(data, batch_sampler=sampler, **{**batches, "batch_size": 1, "drop_last": False})
        if self.kind == "stream":
            return DataLoader(Stream(self.rows), **batches)
        if self.kind == "sized stream":
            return DataLoader(Sized(self.rows), **batches)
        if self.kind == "datasets" and importlib.util.find_spec("datasets"):
            import datasets

            table = datasets.Dataset.from_dict({"row": list(range(self.shard_rows))})
            data = table.to_iterable_dataset(num_shards=len(self.files))
            return DataLoader(data, collate_fn=lambda rows: torch.tensor([one["row"] for one in rows]), **batches)
        if self.kind in ("sharded", "datasets"):
            rows = iter(range(self.shard_rows))
            return DataLoader(Sharded([list(itertools.islice(rows, size)) for size in self.files]), **batches)
        if self.kind == "items":
            return DataLoader(torch.arange(self.rows)[:, None], batch_size=None, sampler=range(self.rows))
        if self.kind == "varying":
            return DataLoader(Rows(99), batch_sampler=Varying([1 + row % 4 for row in range(self.rows % 9 + 1)]))
        return DataLoader(data, **batches)

    @property
    def has_kind(self) -> bool:
        """Whether batches look as `batch` says. What rank 0 divides, or a process sends, is not of every kind."""
        others = self.kind in ("datasets", "items", "varying", "sharded")
        return not (others or self.dispatched or self.workers) and self.batch != "tensor"

    def rows_in(self, batch: Any) -> torch.Tensor:
        """The numbers of the rows of a batch."""
        return torch.tensor(BATCHES[self.batch].rows_of(batch)) if self.has_kind else batch

    @property
    def unseeded(self) -> bool:
        """Whether the order depends on all numbers that were drawn before."""
        return self.kind in ("shuffled", "global weighted", "global subset")

    @property
    def gathers(self) -> bool:
        return self.even and self.again != "other" and self.kind != "varying"

    @property
    def shard_rows(self) -> int:
        return sum(self.files)

    @staticmethod
    def at(epoch: int, reader: Any) -> Any:
        """Tell a dataset which epoch comes, as prepared loaders do; those of Hugging Face reorder their shards."""
        dataset = getattr(reader, "dataset", reader)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        return reader

    def seed(self, rank: int) -> None:
        torch.manual_seed(self.number + 1000 * rank)

    def orders(self, epochs: int) -> list[list[Any]]:
        """What plain PyTorch reads in one process: rows, or whole batches where these have no fixed size."""
        self.seed(0)
        loader = replace(self, batch="tensor").loader()
        if self.kind in ("items", "varying"):
            return [[batch.tolist() for batch in loader] for _ in range(epochs)]
        if self.kind == "datasets":
            return [[row for batch in self.at(epoch, loader) for row in batch.tolist()] for epoch in range(epochs)]
        if self.kind == "seedable":
            found = []
            for epoch in range(epochs):
                generator = torch.Generator().manual_seed(self.number + epoch)
                found.append(list(RandomSampler(range(self.rows), generator=generator)))
            return [rows[: len(rows) // self.size * self.size] if self.drop_last else rows for rows in found]
        return [[row for batch in loader for row in batch.tolist()] for _ in range(epochs)]


def cycle(rows, length):
    return list(itertools.islice(itertools.cycle(rows), length)) if rows else []


def oracle(case: Case, order: list[Any]) -> list[list[list[int]]]:
    """The batches of each rank in an epoch."""
    whole = case.kind in ("items", "varying")  # batches stay whole: each is a row here
    local = 1 if whole else case.size // WORLD if case.split else case.size
    group = local * WORLD
    ranks: list[list[Any]] = [[] for _ in range(WORLD)]
    full = len(order) // group * group
    for first in range(0, full, group):
        for rank in range(WORLD):
            ranks[rank].append(order[first + rank * local :][:local])
    rest = order[full:]
    if rest and (whole or not case.drop_last):
        each = math.ceil(len(rest) / WORLD) if case.dispatched else local
        filled = cycle([*rest, *cycle(order, each * WORLD - len(rest))], each * WORLD) if case.even else rest
        for rank in range(WORLD):
            if part := filled[rank * each :][:each]:
                ranks[rank].append(part)
    return [[batch[0] for batch in batches] for batches in ranks] if whole else ranks


def oracle_of_shards(case: Case, epoch: int) -> list[list[list[int]]]:
    """The same where each rank reads shards of its own."""
    local = case.size // WORLD if case.split else case.size
    own = []
    for rank in range(WORLD):
        part = case.at(epoch, case.loader().dataset.shard(num_shards=WORLD, index=rank))
        rows = [row if isinstance(row, int) else row["row"] for row in part]
        own.append([rows[first : first + local] for first in range(0, len(rows), local)])
        if case.drop_last and not case.even and own[rank] and len(own[rank][-1]) < local:
            own[rank].pop()
    if not case.even:
        return own
    dealt: list[list[list[int]]] = [[] for _ in range(WORLD)]
    pool: list[int] = []
    while any(own):
        heads = [part.pop(0) if part else [] for part in own]
        if pool or any(len(head) < local for head in heads):
            pool += itertools.chain(*heads)
        else:
            for rank, head in enumerate(heads):
                dealt[rank].append(head)
        while len(pool) >= local * WORLD or (pool and not any(own) and not case.drop_last):
            each = min(local, math.ceil(len(pool) / WORLD))
            taken, pool = cycle(pool, each * WORLD), pool[each * WORLD :]
            for rank in range(WORLD):
                dealt[rank].append(taken[rank * each :][:each])
    return dealt


@dataclass
class Epoch:
    """What a rank saw of an epoch: its batches without those skipped, what was gathered, what came after a position."""

    skip: int
    mine: list[Any]
    everything: list[Any]
    rest: list[Any] | None


def read(case: Case) -> list[Epoch]:
    """Read two epochs. Compares nothing, so that all ranks go on together whatever they find."""
    config = DataLoaderConfiguration(
        split_batches=case.split and case.kind not in ("items", "varying"),
        dispatch_batches=case.dispatch,
        even_batches=case.even,
        use_seedable_sampler=case.kind == "seedable",
        data_seed=case.number,
        use_stateful_dataloader=case.stateful,
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    case.seed(accelerator.process_index)
    loader = case.loader()
    if case.skip_before:
        loader = skip_first_batches(loader, case.skip_before)
    loader = accelerator.prepare(loader)
    if case.again == "same":
        loader = accelerator.prepare(loader)
    elif case.again == "other":
        loader = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
    found = []
    for epoch in range(2):
        reading, state = loader, None
        skip = 0 if epoch == 0 or case.unseeded else case.skip
        if skip:
            reading = accelerator.skip_first_batches(loader, skip)
        mine, everything, rest = [], [], None
        for number, batch in enumerate(reading):
            rows = case.rows_in(batch)
            mine.append(rows.tolist())
            if case.gathers:
                everything += accelerator.gather_for_metrics(rows).tolist()
            if case.again == "state" and epoch == 0 and number == 1:
                state = reading.state_dict()
        if state is not None and len(mine) > 2:
            reading.load_state_dict(state)
            rest = [case.rows_in(batch).tolist() for batch in reading]
        found.append(Epoch(skip, mine, everything, rest))
    return found


def difference(case: Case, rank: int, epochs: list[Epoch]) -> str | None:
    """Return what a rank should not have seen."""
    whole = case.kind in ("items", "varying")
    orders = case.orders(len(epochs))
    for number, epoch in enumerate(epochs):
        order, everything = orders[number], epoch.everything
        if case.skip_before:  # what an incomplete last group is filled up with is not compared, as it may begin later
            expected = None
            order = order[case.skip_before * (1 if whole else case.size) :]
        elif case.native:
            expected, order = oracle_of_shards(case, number)[rank], range(case.shard_rows)
        else:
            expected = oracle(case, order)[rank]
        if expected is not None and epoch.mine != expected[epoch.skip :]:
            return f"epoch {number}, rank {rank}: {epoch.mine}, not {expected[epoch.skip :]}"
        if case.gathers and not (epoch.skip or whole or (case.skip_before and (case.native or case.unseeded))):
            group = case.size * (1 if case.split else WORLD)
            kept = len(order) - len(order) % group if case.drop_last else len(order)
            wrong = set(everything) - set(order) if case.native else everything != order[:kept]
            if len(everything) != kept or wrong:
                return f"epoch {number}, gathered: {everything}, not {order}"
        if epoch.rest is not None and epoch.rest != epoch.mine[2:]:
            return f"epoch {number}, taken up: {epoch.rest}, not {epoch.mine[2:]}"
    return None


def check_all(numbers) -> list[str]:
    torch.set_num_threads(1)
    rank = Accelerator(cpu=True).process_index
    wrong = []
    for number in numbers:
        case = Case.of(number)
        found = difference(case, rank, read(case))
        if found:
            wrong.append(f"{case}: {found}")
    return wrong


@pytest.mark.slow
def test_random_loaders_share_out_rows_like_the_oracle(run_ranks):
    for wrong in run_ranks(check_all, range(40), deadline=55):
        assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.limit(180)
def test_rows_of_hundreds_of_random_loaders_are_those_of_the_oracle(run_ranks):
    for wrong in run_ranks(check_all, range(1000, 1400), deadline=170):
        assert not wrong, "\n".join(wrong)
