"""Checkpoints that are loaded to a device, in part or as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.ranks import RunRanks
from torch import nn

from nb_accelerate import Accelerator, init_empty_weights, load_checkpoint_in_model
from nb_accelerate.errors import PlacedModelError
from nb_accelerate.training.bigmodel.mapped import files_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simgpu"), pytest.mark.limit(180)]


def make() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[3].weight = model[0].weight
    return model


def _load(folder: Path, state: dict[str, torch.Tensor], dtype: Any, safe: bool, on_meta: bool) -> None:
    with init_empty_weights() if on_meta else torch.device("cpu"):
        model = make()
    places: dict[str, Any] = {"0": "simgpu:0", "1": "simgpu:1", "2": "cpu", "3": 0}
    load_checkpoint_in_model(model, folder, places, dtype=dtype)
    for name, tensor in state.items():
        here = model.state_dict()[name]
        at = "simgpu:0" if name[0] == "3" else places[name[0]]
        assert here.device == torch.device(at), name
        assert torch.equal(here.cpu(), tensor if dtype is None else tensor.to(dtype))
    assert model[3].weight is model[0].weight
    assert (files_of(model[2].weight) is not None) == (safe and dtype is None)


def _load_all(folder: Path, state: dict[str, torch.Tensor]) -> str:
    for safe in (True, False):
        for dtype in (None, torch.float16):
            for on_meta in (True, False):
                _load(folder / str(safe), state, dtype, safe, on_meta)
    with pytest.raises(PlacedModelError) as caught:
        load_checkpoint_in_model(make(), folder / "True", {"": 0, "3": 2})
    return str(caught.value)


def test_each_weight_goes_to_its_device(tmp_path: Path, run_ranks: RunRanks) -> None:
    plain = make()
    for safe in (True, False):
        Accelerator(cpu=True).save_model(plain, tmp_path / str(safe), safe_serialization=safe)
    (said,) = run_ranks(_load_all, tmp_path, plain.state_dict(), world_size=1, deadline=150)
    assert "sees no device 2" in said
