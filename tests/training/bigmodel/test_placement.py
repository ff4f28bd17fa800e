"""Weights of a block at rest, and while it computes on the CPU. On another device: tests/second_device."""

from __future__ import annotations

import copy
import os
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.bigmodel.mapped import WeightFiles
from nb_accelerate.training.bigmodel.placement import Mapped

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the weights of a block."""
    torch.manual_seed(0)
    save_file({"block.weight": torch.randn(4, 4), "block.bias": torch.randn(4)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def _map(block: nn.Linear, files: WeightFiles) -> Mapped:
    tensors = [(block, name, files[f"block.{name}"]) for name in ("weight", "bias")]
    return Mapped(tensors, CPU, files=files, names=["block.weight", "block.bias"])


class CountedFiles(WeightFiles):
    """Files that count how often they are asked for."""

    fetches = 0

    def fetch(self, names: object) -> None:
        self.fetches += 1


def test_parameters_become_views_of_the_file_and_stay_the_same_objects(path: Path) -> None:
    block, files = nn.Linear(4, 4), WeightFiles([path])
    weight, bias = block.weight, block.bias
    bias.requires_grad_(False)
    placement = _map(block, files)
    assert (placement.name, block.weight is weight, block.bias is bias) == ("block", True, True)
    assert weight.data_ptr() == files["block.weight"].data_ptr()
    assert (weight.requires_grad, bias.requires_grad) == (True, False)
    placement.arrive()
    assert torch.equal(
        block(torch.ones(1, 4)), nn.functional.linear(torch.ones(1, 4), files["block.weight"], files["block.bias"])
    )
    placement.leave()
    assert weight.data_ptr() == files["block.weight"].data_ptr()


def test_tied_parameters_on_meta_are_replaced_by_one(path: Path) -> None:
    files = WeightFiles([path])
    first, second = nn.Linear(4, 4, bias=False, device="meta"), nn.Linear(4, 4, bias=False, device="meta")
    second.weight = first.weight
    tensors = [(owner, "weight", files["block.weight"]) for owner in (first, second)]
    Mapped(tensors, CPU, files=files, names=["block.weight"])
    assert first.weight is second.weight
    assert torch.equal(first.weight, files["block.weight"])


def test_pages_are_fetched_again_only_if_the_process_has_waited_for_one_since(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = 3
    seconds = 0.0
    monkeypatch.setattr("resource.getrusage", lambda _: SimpleNamespace(ru_majflt=faults))
    monkeypatch.setattr("time.monotonic", lambda: seconds)
    files = CountedFiles([path])
    placement = _map(nn.Linear(4, 4), files)
    for _ in range(3):
        if placement.is_wanted():
            placement.fetch()
        placement.arrive()
        placement.leave()
    assert files.fetches == 1
    faults += 1
    assert not placement.is_wanted()
    seconds += 0.2
    assert placement.is_wanted()


def test_all_blocks_of_the_same_files_ask_the_system_for_page_faults_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[int] = []

    def answer(_: int) -> SimpleNamespace:
        questions.append(1)
        return SimpleNamespace(ru_majflt=0)

    monkeypatch.setattr("resource.getrusage", answer)
    monkeypatch.setattr("time.monotonic", lambda: 1.0)
    files = WeightFiles([path])
    placements = [_map(nn.Linear(4, 4), files) for _ in range(3)]
    for placement in placements:
        placement.fetch()
        placement.is_wanted()
    assert len(questions) == 1


def test_a_block_that_nobody_fetched_ahead_is_fetched_when_it_arrives(path: Path) -> None:
    files = CountedFiles([path])
    placement = _map(nn.Linear(4, 4), files)
    placement.arrive()
    assert files.fetches == 1


def test_a_file_that_was_cut_off_is_an_error_and_no_signal(path: Path) -> None:
    placement = _map(nn.Linear(4, 4), WeightFiles([path]))
    placement.arrive()
    placement.leave()
    os.truncate(path, 40)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was cut off"):
        placement.arrive()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_has_placements_of_its_own(path: Path, how: object) -> None:
    block, files = nn.Linear(4, 4), WeightFiles([path])
    block.placement = _map(block, files)  # type: ignore[assignment]
    copied = how(block)  # type: ignore[operator]
    os.truncate(path, 40)  # which the copy does not need
    copied.placement.arrive()
    assert copied.placement.slots == [(copied, "weight"), (copied, "bias")]
    assert copied.weight.data_ptr() != block.weight.data_ptr()
    assert not copied.placement.is_wanted()


def test_weights_of_mapped_files_can_be_trained(path: Path) -> None:
    block, files = nn.Linear(4, 4), WeightFiles([path])
    placement, contents = _map(block, files), path.read_bytes()
    plain = nn.Linear(4, 4)
    plain.load_state_dict(block.state_dict())
    for model in (block, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        placement.arrive()
        model(torch.ones(2, 4)).sum().backward()
        placement.leave()
        optimizer.step()
    assert torch.equal(block.weight, plain.weight)
    assert path.read_bytes() == contents
