"""A disk refuses each operation of a save in turn: the checkpoint that was there is whole still, or the new one is."""

from __future__ import annotations

import errno
import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nb_accelerate
from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.accelerator import Accelerator

OPERATIONS = ("open", "fsync", "mkdir", "rename", "link", "unlink")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)


_open = io.open


class Disk:
    """Counts operations on files; the one with the number `failing` is refused."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.done: set[str] = set()
        self.failing = -1
        self.error = errno.EIO
        for name in OPERATIONS:
            patch.setattr(os, name, self._refusing(name, getattr(os, name)))
        patch.setattr(io, "open", self._refusing("open", self._open))

    def _open(self, *args: Any, **kwargs: Any) -> Any:
        file = _open(*args, **kwargs)
        if file.writable():
            file.write = self._refusing("write", file.write)
        return file

    def _refusing(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*args: Any, **kwargs: Any) -> Any:
            if name in ("write", "fsync") or "/run/" in str(args[0]):  # only files of the checkpoint
                self.count += 1
                self.done.add(name)
                if self.count - 1 == self.failing:
                    raise OSError(self.error, os.strerror(self.error), name)
            return act(*args, **kwargs)

        return refusing


def _trained(start: float) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, _ = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    model.weight.data.fill_(start)
    return accelerator, model


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_whatever_the_disk_refuses_a_whole_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    where = tmp_path / "run" / "state"
    accelerator, model = _trained(0.0)
    accelerator.save_state(where)
    (where / "notes.txt").write_text("mine")
    loaded, weight = _trained(-1.0)
    refused = 0
    for number in itertools.count():
        before = float(weight.weight.data[0, 0]) if number else 0.0
        model.weight.data.fill_(number + 1.0)
        with monkeypatch.context() as patch:
            disk = Disk(patch)
            disk.failing, disk.error = number, ERRORS[(number + first) % 3]
            try:
                accelerator.save_state(where)
                told = ""
            except (CheckpointError, OSError) as error:
                told = str(error)
        [found] = nb_accelerate.checkpoints(where, read=True)
        assert found.is_whole, (number, told, found)
        loaded.load_state(where)
        now = float(weight.weight.data[0, 0])
        assert now == number + 1.0 or (told and now == before), (number, told)
        if told:
            refused += 1
            assert os.strerror(disk.error) in told, told
        if disk.count <= number:
            break  # no operation was left to be refused
    assert refused > 10
    assert "write" in disk.done
    assert sorted(os.listdir(where.parent)) == ["state"]  # what failed saves have left, the last one has removed
    assert (where / "notes.txt").read_text() == "mine"
