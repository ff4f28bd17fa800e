"""Parameters that are on the device for a while, and on the CPU before and afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("simgpu")

_SCRIPT = """
import torch
from nb_accelerate.utils import align_module_device, set_module_tensor_to_device

model = torch.nn.Sequential(torch.nn.Linear(2, 2))
model.scale = torch.nn.Parameter(torch.ones(2), requires_grad=False)
model.still = torch.nn.Parameter(torch.full((2,), 3.0))
scale, still, address, version = model.scale, model.still, model.still.data_ptr(), model.still.data._version
with align_module_device(model):
    assert scale.device.type == "cpu"
with align_module_device(model, execution_device="simgpu"):
    assert model.scale is scale and scale.device == torch.device("simgpu:0")
    assert model[0].weight.device.type == "cpu"
    with torch.no_grad():
        scale.mul_(5)
assert model.scale is scale and scale.tolist() == [5.0, 5.0] and not scale.requires_grad
assert still.device.type == "cpu" and still.data_ptr() == address and still.data._version == version
try:
    with align_module_device(model, execution_device="simgpu:1"):
        assert still.device.index == 1
        raise KeyError
except KeyError:
    assert still.data_ptr() == address

set_module_tensor_to_device(model, "0.weight", "simgpu")
assert isinstance(model[0].weight, torch.nn.Parameter) and model[0].weight.device == torch.device("simgpu:0")
weight = model[0].weight
set_module_tensor_to_device(model, "0.weight", "simgpu")
set_module_tensor_to_device(model, "0.weight", 0)
assert model[0].weight is weight
set_module_tensor_to_device(model, "0.bias", 1, value=torch.tensor([1.0, 2.0]))
assert model[0].bias.device == torch.device("simgpu:1") and model[0].bias.tolist() == [1.0, 2.0]
"""


def test_tensors_are_put_on_the_device_and_brought_back() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True)
