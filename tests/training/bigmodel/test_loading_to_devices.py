"""Checkpoints that are loaded to a device, in part or as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nb_accelerate import Accelerator, init_empty_weights, load_checkpoint_in_model
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.bigmodel.mapped import files_of

pytestmark = pytest.mark.usefixtures("simgpu")


def make() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[3].weight = model[0].weight
    return model


@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_each_weight_goes_to_its_device(tmp_path: Path, dtype: Any, safe: bool, on_meta: bool) -> None:
    plain = make()
    Accelerator(cpu=True).save_model(plain.cpu(), tmp_path, safe_serialization=safe)
    with init_empty_weights() if on_meta else torch.device("cpu"):
        model = make()
    places: dict[str, Any] = {"0": 0, "1": "simgpu:1", "2": "cpu", "3": 0}
    load_checkpoint_in_model(model, tmp_path, places, dtype=dtype)
    for name, tensor in plain.state_dict().items():
        here = model.state_dict()[name]
        at = {"0": "simgpu:0", "1": "simgpu:1", "2": "cpu", "3": "simgpu:0"}[name[0]]
        assert here.device == torch.device(at), name
        assert torch.equal(here.cpu(), tensor if dtype is None else tensor.to(dtype))
    assert model[3].weight is model[0].weight
    assert (files_of(model[2].weight) is not None) == (safe and dtype is None)


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(make().cpu(), tmp_path)
    with pytest.raises(ConfigError, match=r"device_map has '3' on device 2, which"):
        load_checkpoint_in_model(make(), tmp_path, {"": 0, "3": 2})
