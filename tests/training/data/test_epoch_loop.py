"""Which epoch it is, by the loops of users' code as they write them; nothing where that leaves a doubt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nb_accelerate.training.data.epoch_guess import epoch_of


class Loader:
    """Notes what is found at the beginning of each pass."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int] | None] = []

    def __iter__(self) -> Iterator[int]:
        self.found.append(epoch_of(sys._getframe(1)))
        yield from range(2)


class Args:
    epochs = 2

    @property
    def counted(self) -> int:
        return 2


def plain(loader: Loader) -> None:
    for _ in range(2):
        for _ in loader:
            pass


def by_a_name(loader: Loader, epochs: int = 2) -> None:
    for epoch in range(1, epochs + 1):
        for step, _ in enumerate(loader):
            print(epoch, step)


def by_options(loader: Loader) -> None:
    args = Args()
    for _ in range(args.epochs):
        if loader:
            train_one(loader)


def train_one(loader: Loader) -> None:
    for _ in enumerate(
        loader,
    ):
        pass


def goes_on(loader: Loader, first: int = 5) -> None:
    for _ in range(first, 7):
        train_one(loader)


@pytest.mark.parametrize("train", [plain, by_a_name, by_options, goes_on])
def test_an_epoch_is_known_by_the_range_around_the_loop(train: Callable[[Loader], None]) -> None:
    loader = Loader()
    train(loader)
    assert loader.found == [(1, 2), (2, 2)]


def test_a_cell_has_lines_that_are_no_python(tmp_path: Path) -> None:
    cell = "%%distributed -n 2\n!ls\nfor _ in range(2):\n    for _ in loader:\n        pass\n"
    file, loader = tmp_path / "cell.py", Loader()
    file.write_text(cell)
    exec(compile(cell.replace("%%distributed -n 2\n!ls", "\n"), str(file), "exec"), {"loader": loader})
    assert loader.found == [(1, 2), (2, 2)]


def without_a_range(loader: Loader) -> None:
    train_one(loader)


def in_folds(loader: Loader) -> None:
    for _ in range(2):
        plain(loader)


def until_a_step(loader: Loader) -> None:
    for _ in range(9):
        for step, _ in enumerate(loader):
            if step == 1:
                break


def by_hand(loader: Loader) -> None:
    for _ in range(9):
        next(iter(loader))


def while_it_improves(loader: Loader) -> None:
    again = [True, False]
    while again.pop(0):
        train_one(loader)


def by_a_property(loader: Loader) -> None:
    args = Args()
    for _ in range(args.counted):
        train_one(loader)


@pytest.mark.parametrize("train", [without_a_range, in_folds, until_a_step, by_hand, while_it_improves, by_a_property])
def test_where_it_is_not_sure_nothing_is_said(train: Callable[[Loader], None]) -> None:
    loader = Loader()
    train(loader)
    assert {*loader.found} == {None}
