"""How many epochs a run has: told by `Accelerator.epochs`, or by the range of a plain loop."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nb_accelerate import Accelerator
from nb_accelerate.base.progress_page import Sample, here
from nb_accelerate.base.progress_page.sample import read
from nb_accelerate.errors import ConfigError


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    here().begin_request()
    monkeypatch.setattr(here(), "is_read", True)  # as the page of a rank is
    accelerator = Accelerator(cpu=True)
    yield accelerator.prepare(DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2))
    here().begin_request()


def noted() -> tuple[int, int]:
    sample: Sample = read(here().buffer)
    return sample.epoch, sample.epochs


def one_epoch(loader: Any) -> tuple[int, int]:
    for _ in loader:
        pass
    return noted()


def test_epochs_tells_it_and_so_does_the_range_of_a_plain_loop(loader):
    seen = []
    for _fold in range(2):
        for epoch in Accelerator(cpu=True).epochs(3, start=1):
            seen += [(epoch, *one_epoch(loader))]
    assert seen == [(1, 2, 3), (2, 3, 3)] * 2
    here().begin_request()
    assert [one_epoch(loader)[1] for _ in range(2)] == [0, 0], "a loop that is no statement is not read"
    for epoch in range(1, 3):
        assert one_epoch(loader) == (epoch, 2)
    assert one_epoch(loader)[1] == 0


def test_the_frame_of_a_loop_does_not_keep_what_its_names_had(loader):
    config = locals()
    for _ in range(1):
        one_epoch(loader)
    assert config["loader"] is loader, "a program keeps its own"
    assert not kept_by_a_loop(loader)


def kept_by_a_loop(loader: Any) -> bool:
    model = torch.nn.Linear(1, 1)
    gone = weakref.ref(model)
    for _ in range(1):
        one_epoch(loader)
    del model
    return gone() is not None


def test_epochs_takes_whole_numbers():
    with pytest.raises(ConfigError, match=r"number=1\.5"):
        Accelerator(cpu=True).epochs(1.5)  # type: ignore[arg-type]
