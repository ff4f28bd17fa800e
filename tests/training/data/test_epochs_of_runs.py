"""How many epochs a run has: told by `Accelerator.epochs`, or read from the loop around a loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nb_accelerate import Accelerator
from nb_accelerate.base.progress_page import Sample, here
from nb_accelerate.base.progress_page.sample import read
from nb_accelerate.errors import ConfigError

EPOCHS = 2


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    here().begin_request()
    monkeypatch.setattr(here(), "is_read", True)  # as the page of a rank is
    accelerator = Accelerator(cpu=True)
    yield accelerator.prepare(DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2))
    here().begin_request()


def noted() -> tuple[int, int]:
    sample: Sample = read(here()._memory)
    return sample.epoch, sample.epochs


def one_epoch(loader: Any) -> tuple[int, int]:
    for _ in loader:
        pass
    return noted()


def test_the_range_around_a_loop_is_read(loader):
    seen = []
    for _epoch in range(3):
        for _ in loader:
            seen += [noted()]
    assert seen == [(1, 3)] * 2 + [(2, 3)] * 2 + [(3, 3)] * 2


def test_it_is_read_in_the_function_that_calls_the_loop_and_folds_count_too(loader):
    seen = []
    for fold in range(2):
        for epoch in range(1, 1 + EPOCHS):
            seen += [(fold, epoch, *one_epoch(loader))]
    assert seen == [(0, 1, 1, 4), (0, 2, 2, 4), (1, 1, 3, 4), (1, 2, 4, 4)]


def test_what_cannot_be_read_says_nothing(loader):
    def number() -> int:
        return 3

    for _epoch in range(number()):
        one_epoch(loader)
        assert noted()[1] == 0
    for _epoch in [1, 2]:
        assert one_epoch(loader)[1] == 0


def test_evaluation_alone_has_no_epochs(loader):
    for _epoch in range(2):
        with torch.no_grad():
            assert one_epoch(loader)[1] == 0


def test_epochs_tells_it_and_counts_more_than_what_is_read(loader):
    seen = []
    for _fold in range(2):
        for epoch in Accelerator(cpu=True).epochs(3, start=1):
            seen += [(epoch, *one_epoch(loader))]
    assert seen == [(1, 2, 3), (2, 3, 3)] * 2


def test_epochs_takes_whole_numbers():
    with pytest.raises(ConfigError, match=r"number=1\.5"):
        Accelerator(cpu=True).epochs(1.5)  # type: ignore[arg-type]


def test_a_loop_around_a_library_that_loops_over_epochs_says_nothing(loader, tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "some_trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def fit(loader):\n    for _ in range(5):\n        list(loader)\n")
    monkeypatch.syspath_prepend(str(package.parent))
    import some_trainer

    for _seed in range(3):
        some_trainer.fit(loader)
        assert noted()[1] == 0


def test_a_bar_around_the_loader_changes_nothing(loader, monkeypatch):
    from tqdm import tqdm

    monkeypatch.setattr(tqdm, "monitor_interval", 0)

    for _epoch in range(2):
        assert one_epoch(tqdm(loader, disable=True))[1] == 2
