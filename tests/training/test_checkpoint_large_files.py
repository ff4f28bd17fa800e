"""Files of several blocks and windows: what is read or mapped is compared with what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nb_accelerate import Accelerator
from nb_accelerate.checkpoint import reading
from nb_accelerate.checkpoint.checksums import BLOCK, FileRecord, Verification
from nb_accelerate.checkpoint.files import load_state_dict, read
from nb_accelerate.checkpoint.manifest import Manifest
from nb_accelerate.checkpoint.reading import compare_tensors, read_in_memory
from nb_accelerate.errors import CheckpointError
from nb_accelerate.process import context

PLACES = (0.0, 0.3, 0.5, 0.9, 1.0)
"""Parts of a file of two blocks after which a bit is flipped."""


def _trained(seed: int) -> tuple[Any, Any, Any]:
    context.reset()
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True)
    # Weights of 400 KB, 18 MB and 12 bytes: windows of the files lie inside one of them, and across several.
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


def test_ranks_of_a_machine_compare_a_part_of_the_mapped_weights_each(saved: tuple[Path, list[torch.Tensor]]):
    folder, _ = saved
    manifest = Manifest.read(folder)
    assert manifest is not None
    file = folder / "model.safetensors"
    files: dict[str, FileRecord] = {file.name: manifest.files[file.name]}
    for part in PLACES[1:]:  # without its first byte it would be no safetensors
        place = _flip(file, part)
        found = []
        for rank in (0, 1):
            compared = Verification(folder, files, rank=rank, num_ranks=2)
            compare_tensors(file, load_state_dict(file), compared)
            found.append(len(compared.result()))
        assert found == [1, 0] if place < BLOCK else [0, 1]
        _flip(file, part)


def test_conjugated_and_negated_views_of_a_file_keep_their_values(tmp_path: Path):
    wave = torch.tensor([1 + 2j, 3 - 4j])
    torch.save({"plain": wave, "conjugated": wave.conj(), "negated": wave.clone().conj().imag}, tmp_path / "views.pt")
    loaded = read_in_memory(tmp_path / "views.pt", if_trusted="")
    assert loaded["plain"].tolist() == [1 + 2j, 3 - 4j]
    assert loaded["conjugated"].tolist() == [1 - 2j, 3 + 4j]
    assert loaded["negated"].tolist() == [-2.0, 4.0]


def test_a_tensor_that_is_twice_in_a_file_stays_one_and_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    best = torch.arange(4.0)
    torch.save({"best": best, "last": best, "sparse": [best.to_sparse()] * 2}, tmp_path / "twice.pt")
    mapped: list[bool] = []

    def note_how(*arguments: Any, mmap: bool = False, **options: Any) -> Any:
        mapped.append(mmap)
        return read(*arguments, mmap=mmap, **options)

    monkeypatch.setattr(reading, "read", note_how)
    loaded = read_in_memory(tmp_path / "twice.pt", if_trusted="")
    assert mapped == [True]
    assert loaded["best"] is loaded["last"]
    assert loaded["best"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert loaded["sparse"][0] is loaded["sparse"][1]
