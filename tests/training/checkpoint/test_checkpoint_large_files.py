"""Files of several blocks: what is read or mapped is compared with what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nb_accelerate import Accelerator
from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.checkpoint.checksums import BLOCK
from nb_accelerate.training.process import context

PLACES = (0.0, 0.3, 0.5, 0.9, 1.0)
"""Parts of a file of two blocks after which a bit is flipped."""


def _trained(seed: int) -> tuple[Any, Any, Any]:
    context.reset()
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True)
    # Weights of 400 KB, 18 MB and 12 bytes: the file has two blocks.
    model = nn.Sequential(nn.Linear(100, 1000), nn.Linear(1000, 4500), nn.Linear(4500, 3))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    accelerator.backward(model(torch.ones(2, 100)).square().mean())
    optimizer.step()
    return accelerator, model, optimizer


def _numbers(model: Any, optimizer: Any) -> list[torch.Tensor]:
    of_optimizer = [one["momentum_buffer"] for one in optimizer.state_dict()["state"].values()]
    return [one.clone() for one in (*model.state_dict().values(), *of_optimizer)]


def _are_equal(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[torch.Tensor]]:
    accelerator, model, optimizer = _trained(0)
    folder = tmp_path / "saved"
    accelerator.save_state(folder)
    return folder, _numbers(model, optimizer)


def _flip(path: Path, part: float) -> int:
    """Flip a bit; doing it again mends the file. Return where, in bytes."""
    place = min(int(part * path.stat().st_size), path.stat().st_size - 1)
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    return place


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_a_flipped_bit_of_a_large_file_is_refused_before_anything_changes(
    saved: tuple[Path, list[torch.Tensor]], name: str
):
    folder, expected = saved
    accelerator, model, optimizer = _trained(1)
    before = _numbers(model, optimizer)
    assert (folder / name).stat().st_size > BLOCK
    for part in PLACES:
        _flip(folder / name, part)
        with pytest.raises(CheckpointError, match=name):
            accelerator.load_state(folder)
        assert _are_equal(_numbers(model, optimizer), before), part
        _flip(folder / name, part)
    accelerator.load_state(folder)
    assert _are_equal(_numbers(model, optimizer), expected)
