"""Prepared loaders: the cost of a batch over a plain loader, of the first batch, of a skip, and of dispatching."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from turns import medians

from nb_accelerate import notebook_launcher

BATCHES = 2000


def _empty(loader: Iterator[object] | DataLoader[object]) -> None:
    for _ in loader:
        pass


def _per_batch() -> list[str]:
    from accelerate import Accelerator as Theirs

    from nb_accelerate import Accelerator

    data = TensorDataset(torch.zeros(BATCHES, 8))
    plain = DataLoader(data, batch_size=1)
    ours = Accelerator(cpu=True).prepare(DataLoader(data, batch_size=1))
    theirs = Theirs(cpu=True).prepare(DataLoader(data, batch_size=1))
    taken = medians(
        {"plain": lambda: _empty(plain), "ours": lambda: _empty(ours), "theirs": lambda: _empty(theirs)}, rounds=9
    )
    mine, other = (1e6 * (taken[name] - taken["plain"]) / BATCHES for name in ("ours", "theirs"))
    return [
        f"a batch over a plain loader    {mine / other:5.2f} of accelerate  ({mine:.1f} µs, accelerate {other:.1f})"
    ]


class _Stream(IterableDataset[int]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rows))


def _per_batch_of_a_stream() -> list[str]:
    """Measure one rank of two that both read all rows and keep theirs, beside a plain loader of as many batches."""
    from accelerate.data_loader import prepare_data_loader as theirs

    from nb_accelerate.data_loader import prepare_data_loader as ours

    size, ranks = 8, 2
    plain = DataLoader(_Stream(BATCHES * size), batch_size=size)
    options = {"num_processes": ranks, "process_index": 0, "dispatch_batches": False}
    options |= {"put_on_device": True, "device": torch.device("cpu")}
    whole = DataLoader(_Stream(ranks * BATCHES * size), batch_size=size)
    loaders = {"plain": plain, "ours": ours(whole, **options), "theirs": theirs(whole, **options)}  # type: ignore[arg-type]
    taken = medians({name: partial(_empty, loader) for name, loader in loaders.items()}, rounds=15)
    mine, other = (1e6 * (taken[name] - taken["plain"]) / BATCHES for name in ("ours", "theirs"))
    return [
        f"a batch of a stream over plain {mine / other:5.2f} of accelerate  ({mine:.1f} µs, accelerate {other:.1f})"
    ]


def _first_batches() -> list[str]:
    from accelerate import Accelerator as Theirs

    from nb_accelerate import Accelerator

    lines = []
    for name, rows in (("10,000 rows", 10_000), ("1,000,000", 1_000_000)):
        for shuffle in (False, True):
            rounds = 7 if shuffle and rows == 1_000_000 else 200
            data = DataLoader(TensorDataset(torch.zeros(rows, 8)), batch_size=8, shuffle=shuffle)
            mine, other = Accelerator(cpu=True).prepare(data), Theirs(cpu=True).prepare(data)
            taken = medians(
                {"ours": lambda: next(iter(mine)), "theirs": lambda: next(iter(other))},  # noqa: B023 - run at once
                rounds=rounds,
            )
            lines.append(
                f"first batch of {name + (', shuffled' if shuffle else ''):<21} {taken['ours'] / taken['theirs']:5.2f} "
                f"of accelerate  ({1e6 * taken['ours']:.0f} µs, accelerate {1e6 * taken['theirs']:.0f})"
            )
    return lines


class _Rows(Dataset[int]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        return index


def _skips() -> list[str]:
    from accelerate import Accelerator as Theirs
    from accelerate.utils import DataLoaderConfiguration as TheirConfiguration

    from nb_accelerate import Accelerator, DataLoaderConfiguration

    lines = []
    for name, size, shuffle, seeded in (
        ("in order", 4, False, False),
        ("shuffled", 4, True, False),
        ("by a seed", 64, True, True),
    ):
        loader = DataLoader(_Rows(), batch_size=size, shuffle=shuffle)
        config = {"use_seedable_sampler": True, "data_seed": 1} if seeded else {}
        ours = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))  # type: ignore[arg-type]
        theirs = Theirs(cpu=True, dataloader_config=TheirConfiguration(**config))  # type: ignore[arg-type]
        mine, other = ours.prepare(loader), theirs.prepare(loader)
        half = 500_000 // size
        taken = medians(
            {
                "permutation": lambda: torch.randperm(1_000_000),
                "ours": lambda: next(iter(ours.skip_first_batches(mine, half))),  # noqa: B023 - run at once
                "theirs": lambda: next(iter(theirs.skip_first_batches(other, half))),  # noqa: B023 - likewise
            },
            rounds=5,
        )
        lines.append(
            f"half a million rows {name:<10} {taken['ours'] / taken['theirs']:5.2f} of accelerate  "
            f"({1e3 * taken['ours']:.1f} ms, accelerate {1e3 * taken['theirs']:.1f}, "
            f"a bare permutation {1e3 * taken['permutation']:.1f})"
        )
    return lines


def _dispatch(rows: int, width: int) -> dict[str, float]:
    import torch.distributed as dist
    from accelerate import Accelerator as Theirs
    from accelerate.utils import DataLoaderConfiguration as TheirConfiguration

    from nb_accelerate import Accelerator, DataLoaderConfiguration

    torch.set_num_threads(1)
    ours = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True, split_batches=True))
    theirs = Theirs(dataloader_config=TheirConfiguration(dispatch_batches=True, split_batches=True))
    batches = torch.zeros(100, rows, width)

    class _Ready:
        """Hands out batches that exist already, so that what is timed is how they travel."""

        drop_last = False

        def __init__(self, size: int) -> None:
            self.batch_size = size

        def __len__(self) -> int:
            return len(batches)

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[number] for number in range(len(batches))])

    class _Stored(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return len(batches) * rows

    def ready() -> DataLoader[object]:
        return DataLoader(_Stored(), batch_sampler=_Ready(rows), collate_fn=lambda numbers: batches[numbers[0]])  # type: ignore[arg-type]

    mine, other = ours.prepare(ready()), theirs.prepare(ready())

    def bare() -> None:
        for _ in DataLoader(_Stored(), batch_sampler=_Ready(rows), collate_fn=lambda numbers: batches[numbers[0]]):  # type: ignore[arg-type]
            dist.broadcast(torch.empty(rows, width), 0)

    actions = {"bare": bare, "ours": lambda: _empty(mine), "theirs": lambda: _empty(other)}
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(7):
        for name, action in actions.items():
            dist.barrier()
            began = time.perf_counter()
            action()
            taken[name].append((time.perf_counter() - began) / len(batches))
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _dispatching() -> list[str]:
    lines = []
    for name, rows, width in (("32 KB", 32, 256), ("4 MB", 512, 2048)):
        taken = notebook_launcher(_dispatch, (rows, width), num_processes=2, progress="off", timeout=300)[0]
        lines.append(
            f"dispatching a batch of {name:<7} {taken['ours'] / taken['bare']:5.2f} of a bare broadcast  "
            f"({1e6 * taken['ours']:.0f} µs; accelerate {taken['theirs'] / taken['bare']:.2f})"
        )
    return lines


def measure() -> list[str]:
    return [*_per_batch(), *_per_batch_of_a_stream(), *_first_batches(), *_skips(), *_dispatching()]
