"""A file that every rank saves with ``torch.save`` is whole, and is told once."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks


def save(folder: str, kind: str) -> list[str]:
    from nb_accelerate import Accelerator

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nb_accelerate").addHandler(handler)
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    path = os.path.join(folder, f"best{accelerator.process_index if kind == 'each its own' else ''}.pt")
    for _ in range(3):
        if kind != "one rank" or accelerator.is_main_process:
            torch.save(model.state_dict() if kind == "wrapped" else {"weights": torch.ones(2)}, path)
    accelerator.wait_for_everyone()
    assert torch.load(path) is not None
    return said


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (
            "wrapped",
            ', and without "module." in its keys: accelerator.save(accelerator.unwrap_model(model).state_dict(), ',
        ),
        ("plain", ": accelerator.save(..., "),
    ],
)
def test_a_file_that_all_ranks_write_is_told_once(run_ranks: RunRanks, tmp_path: Path, kind: str, advice: str):
    first, second = run_ranks(save, str(tmp_path), kind)
    line = 'torch.save(model.state_dict() if kind == "wrapped" else {"weights": torch.ones(2)}, path)'
    assert first + second == [
        f'{line}: several ranks write this file, one after the other. To write it once{advice}"{tmp_path}/best.pt")'
    ]
    assert os.listdir(tmp_path) == ["best.pt"]


@pytest.mark.parametrize("kind", ["each its own", "one rank"])
def test_files_that_one_rank_writes_are_not(run_ranks: RunRanks, tmp_path: Path, kind: str):
    assert run_ranks(save, str(tmp_path), kind) == [[], []]


def test_a_file_is_never_there_in_part(run_ranks: RunRanks, tmp_path: Path):
    path = tmp_path / "best.pt"
    torch.save({}, path)
    path.chmod(0o640)
    link = tmp_path / "link.pt"
    link.symlink_to(path)

    class Fails:
        def __reduce__(self) -> str:
            raise RuntimeError("it is not saved")

    def fail() -> str:
        try:
            torch.save([torch.ones(1000), Fails()], link)
        except RuntimeError as error:
            torch.save({"saved": "afterwards"}, link)
            return str(error)
        return ""

    def fail_first() -> None:
        torch.save([torch.ones(1000), Fails()], link)

    with pytest.raises(RuntimeError, match="it is not saved"):
        run_ranks(fail_first)
    assert torch.load(path) == {}
    assert run_ranks(fail) == ["it is not saved"] * 2
    assert torch.load(path) == {"saved": "afterwards"}
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "link.pt"]
