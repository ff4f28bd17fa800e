"""Models that are made without weights."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from nb_accelerate import init_empty_weights, init_on_device


class Scaled(nn.Module):
    """A parameter with an attribute, one that is missing, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_parameter("bias", None)
        self.register_buffer("table", torch.arange(3.0))


def test_parameters_take_no_memory_and_buffers_keep_their_values() -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(1 << 14, 1 << 14), nn.BatchNorm1d(4), Scaled())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model[0].weight.shape == (1 << 14, 1 << 14)
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[1].running_var.tolist() == [1.0] * 4
    assert model[2].table.tolist() == [0.0, 1.0, 2.0]
    assert not model[2].weight.requires_grad
    assert model[2].bias is None
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_buffers_are_left_out_too_if_asked() -> None:
    with init_empty_weights(include_buffers=True):
        model = nn.Sequential(nn.BatchNorm1d(4), Scaled())
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}


def test_ties_stay_ties() -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
    assert model[1].weight is model[0].weight


def test_a_parameter_keeps_its_class_and_its_attributes() -> None:
    class Packed(nn.Parameter):
        def __new__(cls, data: torch.Tensor, requires_grad: bool = False, scale: float = 1.0) -> Packed:
            made = torch.Tensor._make_subclass(cls, data, requires_grad)
            made.scale = scale
            return made

    with init_empty_weights():
        model = nn.Module()
        model.weight = Packed(torch.ones(3), scale=0.5)
    assert type(model.weight) is Packed
    assert model.weight.scale == 0.5
    assert model.weight.is_meta


def test_only_modules_of_this_thread_are_made_without_weights() -> None:
    made: list[nn.Module] = []
    with init_empty_weights():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert made[0].weight.device.type == "cpu"


def test_an_exception_ends_it() -> None:
    with pytest.raises(KeyError), init_on_device("meta", include_buffers=True):
        raise KeyError
    assert nn.BatchNorm1d(2).running_mean.device.type == "cpu"


def test_a_model_without_weights_is_materialised_by_assignment() -> None:
    plain = nn.Linear(3, 2)
    with init_empty_weights():
        empty = nn.Linear(3, 2)
    empty.load_state_dict(plain.state_dict(), assign=True)
    inputs = torch.randn(4, 3)
    assert torch.equal(empty(inputs), plain(inputs))
