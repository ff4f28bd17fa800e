"""Which weights come to a device together."""

from __future__ import annotations

import torch
from fixtures.placed_models import Placed
from torch import nn

from nb_accelerate.training.bigmodel.attach import find_blocks
from nb_accelerate.training.bigmodel.tensors import tensor_names

CPU = torch.device("cpu")


def _blocks(model: nn.Module, *classes: str, devices: dict[str, torch.device] | None = None) -> dict[str, list[str]]:
    names = tensor_names(model)
    found = find_blocks(model, names, {**dict.fromkeys(names, CPU), **(devices or {})}, classes)
    assert sorted(f"{block.name}.{name}".lstrip(".") for block in found for name in block.tensors) == sorted(names)
    return {block.name: block.tensors for block in found}


def test_elements_of_the_largest_list_are_blocks_and_what_is_beside_them_is_with_its_module() -> None:
    blocks = _blocks(Placed(layers=2))
    assert list(blocks) == ["", "embedding", "layers.0", "layers.1", "norm", "head"]
    assert blocks["layers.1"] == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert blocks[""] == ["scale", "table"]


def test_classes_that_a_model_names_come_before_its_lists() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.ModuleList([nn.Linear(2, 2)]))
    model._no_split_modules = ["Sequential"]
    assert list(_blocks(model)) == [""]
    assert list(_blocks(model[0])) == ["0", "1"]
    assert list(_blocks(Placed(layers=1), "Layer")) == ["", "embedding", "layers.0", "norm", "head"]


def test_lists_of_lists_and_of_parameters_are_not_called_so_who_calls_has_their_weights() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ParameterList([torch.ones(1), torch.ones(1)])
            self.towers = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert _blocks(Owner()) == {"": ["rows.0", "rows.1"], "towers.0.0": ["weight", "bias"]}


def test_modules_that_read_weights_of_others_have_them_in_their_block() -> None:
    model = nn.Sequential(
        nn.MultiheadAttention(4, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(1, 1)
    )
    assert list(_blocks(model)) == ["0", "1", "2"]


def test_a_block_computes_on_one_device() -> None:
    there = dict.fromkeys(["layers.0.up.weight", "layers.0.up.bias"], torch.device("meta"))
    blocks = _blocks(Placed(layers=2), devices=there)
    assert [name for name in blocks if "layers" in name] == ["layers.0.up", "layers.0.down", "layers.1"]
