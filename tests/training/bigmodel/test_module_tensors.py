"""Parameters and buffers that are put on devices, beside accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import accelerate.utils as theirs
import pytest
import torch
from torch import Tensor, nn

import nb_accelerate.utils as ours
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

BOTH = pytest.mark.parametrize("library", [ours, theirs])


class Model(nn.Module):
    """A parameter that is trained, one that is not, buffers of two kinds, and a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("count", torch.tensor(3))


def described(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (
            type(tensor),
            tensor.device.type,
            tensor.dtype,
            tensor.requires_grad,
            None if tensor.is_meta else tensor.tolist(),
        )
        for name, tensor in tensors.items()
    }


CALLS: dict[str, Callable[[Any, nn.Module], None]] = {
    "to meta": lambda put, model: put(model, "inner.weight", "meta"),
    "to meta by device": lambda put, model: put(model, "inner.weight", torch.device("meta")),
    "a buffer to meta": lambda put, model: put(model, "table", "meta"),
    "to meta in 16 bits": lambda put, model: put(model, "scale", "meta", dtype=torch.float16),
    "where it is": lambda put, model: put(model, "inner.weight", "cpu"),
    "where it is, in 16 bits, which does nothing": lambda put, model: put(model, "scale", "cpu", dtype=torch.float16),
    "a value": lambda put, model: put(model, "inner.weight", "cpu", value=torch.full((2, 3), 5.0)),
    "a value on meta": lambda put, model: put(model, "inner.weight", "meta", value=torch.full((2, 3), 5.0)),
    "a value of other numbers": lambda put, model: put(model, "inner.bias", "cpu", value=torch.tensor([5, 6])),
    "a value and a dtype": lambda put, model: put(model, "inner.bias", "cpu", torch.ones(2), torch.bfloat16),
    "whole numbers and a dtype": lambda put, model: put(model, "scale", "cpu", torch.tensor([5, 6]), torch.float16),
    "a buffer's value": lambda put, model: put(model, "table", "cpu", value=torch.zeros(4), dtype=torch.float64),
    "a whole number": lambda put, model: put(model, "count", "cpu", value=torch.tensor(7.9)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_tensor_is_put_as_by_accelerate(call: Callable[[Any, nn.Module], None]) -> None:
    models = []
    for library in (ours, theirs):
        torch.manual_seed(0)
        models.append(Model())
        call(library.set_module_tensor_to_device, models[-1])
    assert described(models[0]) == described(models[1])


@BOTH
def test_a_parameter_from_meta_gets_its_value_and_keeps_what_transformers_noted(library: Any) -> None:
    model = Model().to("meta")
    model.scale._is_hf_initialized = True  # type: ignore[attr-defined]
    library.set_module_tensor_to_device(model, "scale", "cpu", value=torch.tensor([1.0, 2.0]))
    assert model.scale.tolist() == [1.0, 2.0]
    assert model.scale._is_hf_initialized  # type: ignore[attr-defined]
    assert not model.scale.requires_grad


REFUSED: dict[str, Callable[[Any], None]] = {
    "another shape": lambda put: put(Model(), "inner.weight", "cpu", value=torch.ones(3, 2)),
    "no such tensor": lambda put: put(Model(), "inner.height", "cpu"),
    "no such tensor but a module": lambda put: put(Model(), "inner", "cpu"),
    "from meta without a value": lambda put: put(Model().to("meta"), "inner.weight", "cpu"),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_put_is_refused_with_accelerates_type_of_error(call: Callable[[Any], None]) -> None:
    for library in (ours, theirs):
        with pytest.raises(ValueError, match=r"inner|weight|height") as caught:
            call(library.set_module_tensor_to_device)
        assert caught.type is (ConfigError if library is ours else ValueError)


def test_no_such_module_is_an_attribute_error_as_in_accelerate() -> None:
    for library in (ours, theirs):
        with pytest.raises(AttributeError, match="outer"):
            library.set_module_tensor_to_device(Model(), "outer.weight", "cpu")


@BOTH
def test_tied_tensors_are_one_on_the_device(library: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    resting = model[0].weight.data
    ties: dict[int, dict[Any, Tensor]] = {resting.data_ptr(): {}}
    for layer in model:
        library.set_module_tensor_to_device(layer, "weight", "meta")
    for layer in model:
        library.set_module_tensor_to_device(layer, "weight", "cpu", value=resting, tied_params_map=ties)
    assert model[0].weight is model[1].weight
    assert ties[resting.data_ptr()]["cpu"] is model[0].weight
    assert model[0].weight.tolist() == resting.tolist()


class Packed(nn.Parameter):
    """A subclass of parameters."""


@BOTH
def test_subclasses_of_parameters_stay_what_they_are(library: Any) -> None:
    model = nn.Module()
    model.weight = Packed(torch.ones(2), requires_grad=False)
    library.set_module_tensor_to_device(model, "weight", "cpu", value=torch.zeros(2))
    assert type(model.weight) is Packed
    assert not model.weight.requires_grad


class Wrapped(Tensor):
    """A subclass of tensors, as quantised ones of torchao."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Wrapped:
        return Tensor._make_subclass(cls, data)


def test_subclasses_of_tensors_stay_parameters() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(Wrapped(torch.ones(2)), requires_grad=False)
    ours.set_module_tensor_to_device(model, "weight", "cpu", value=Wrapped(torch.zeros(2)))
    assert type(model.weight) is Wrapped
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.tolist() == [0.0, 0.0]


class Int8Params(nn.Parameter):
    """Has the name and arguments of the class in bitsandbytes: 8-bit numbers when it moves, with a scale."""

    def __new__(cls, data: Tensor, requires_grad: bool = True, **fields: Any) -> Int8Params:
        made = Tensor._make_subclass(cls, data, requires_grad)
        made.__dict__.update(fields)
        return made

    def to(self, device: Any, **_: Any) -> Any:
        if torch.device(device).type == "meta" or not self.is_floating_point():
            return Int8Params(self.data.to(device), requires_grad=False, **self.__dict__)
        scale = self.data.abs().max() / 127
        return Int8Params((self.data / scale).round().to(torch.int8), False, **(self.__dict__ | {"SCB": scale}))


def test_quantised_parameters_keep_their_fields_and_scales() -> None:
    model = nn.Module()
    model.weight = Int8Params(torch.ones(2, device="meta"), requires_grad=False, SCB=None, threshold=6.0)
    ours.set_module_tensor_to_device(model, "weight", "cpu", value=torch.tensor([1.0, -2.0]))
    assert model.weight.tolist() == [64, -127]
    assert pytest.approx(2 / 127) == model.weight.SCB
    assert model.weight.threshold == 6.0
    values = torch.tensor([3, 4], dtype=torch.int8)
    model.weight = Int8Params(torch.ones(2, device="meta"), requires_grad=False, SCB=None, threshold=6.0)
    ours.set_module_tensor_to_device(model, "weight", "cpu", value=values, fp16_statistics=torch.tensor([0.5]))
    assert model.weight.tolist() == [3, 4]
    assert model.weight.dtype is torch.int8
    assert model.weight.SCB.tolist() == [0.5]


class Hook:
    """What `align_module_device` asks of a hook: it notes its calls."""

    def __init__(self, offload: Any = True) -> None:
        self.offload = offload
        self.execution_device: Any = "cpu"
        self.calls: list[Any] = []

    def pre_forward(self, module: nn.Module, *args: Any) -> None:
        self.calls.append(("before", self.execution_device, *args))
        if module.training:
            return
        raise KeyError

    def post_forward(self, _module: nn.Module, output: Any) -> None:
        self.calls.append(("after", self.execution_device, output))


def test_only_a_hook_that_offloads_counts() -> None:
    model = Model()
    assert not ours.has_offloaded_params(model)
    for offload in (False, lambda: None, True):  # the one in the middle is a method of accelerate's UserCpuOffloadHook
        model._hf_hook = Hook(offload)  # type: ignore[assignment]
        assert ours.has_offloaded_params(model) is (offload is True)


def test_a_hook_brings_the_weights_and_takes_them_away() -> None:
    model, hook = Model(), Hook()
    model._hf_hook = hook  # type: ignore[assignment]
    with ours.align_module_device(model):
        hook.calls.append("inside")
    hook.execution_device = "cuda"
    with ours.align_module_device(model, execution_device="cpu"):
        pass
    assert hook.calls == [
        ("before", "cpu"), "inside", ("after", "cpu", None), ("before", "cpu"), ("after", "cpu", None)
    ]  # fmt: skip
    assert hook.execution_device == "cuda"


@pytest.mark.parametrize("fails_inside", [True, False])
def test_weights_are_taken_away_after_an_exception(fails_inside: bool) -> None:
    model, hook = Model(), Hook()
    model._hf_hook = hook  # type: ignore[assignment]
    model.train(fails_inside)  # else the hook itself fails
    with pytest.raises(KeyError), ours.align_module_device(model, "cpu"):
        raise KeyError
    assert hook.calls[-1] == ("after", "cpu", None)


def test_a_module_without_numbers_cannot_be_aligned() -> None:
    empty = nn.Linear(2, 2, device="meta")
    for library in (ours, theirs):
        with pytest.raises(ValueError, match="meta"), library.align_module_device(empty, "cpu"):
            pass
