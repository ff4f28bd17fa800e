"""Hooks around the forward of a module, beside accelerate's where it has them."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import accelerate.hooks
import pytest
import torch
from fixtures.placed_models import Layer
from torch import nn

from nb_accelerate import big_modeling, hooks
from nb_accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module

NAMES = [
    name for name, value in vars(accelerate.hooks).items() if getattr(value, "__module__", "") == "accelerate.hooks"
]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("_")])
def test_names_have_accelerates_arguments(name: str) -> None:
    theirs, ours = getattr(accelerate.hooks, name), getattr(hooks, name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


class Noting(ModelHook):
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.events.append(f"{self.name} before")
        return tuple(arg + 1 for arg in args), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.events.append(f"{self.name} after")
        return output * 2

    def forward_failed(self, module: nn.Module) -> None:
        self.events.append(f"{self.name} failed")


def test_hooks_change_arguments_and_outputs_in_their_order() -> None:
    events: list[str] = []
    module = nn.Identity()
    add_hook_to_module(module, Noting("first", events))
    add_hook_to_module(module, Noting("second", events), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert module(torch.ones(1)).item() == 12
    assert events == ["first before", "second before", "first after", "second after"]
    assert list(inspect.signature(module.forward).parameters) == ["input"]


def test_a_second_hook_takes_the_place_of_the_first_and_both_can_be_removed() -> None:
    module = nn.Linear(2, 2)
    plain = module.forward
    events: list[str] = []
    for name in ("first", "second"):
        add_hook_to_module(module, Noting(name, events))
    module(torch.ones(1, 2))
    assert events == ["second before", "second after"]
    assert remove_hook_from_module(module) is module
    assert module.forward == plain
    assert "forward" not in vars(module)
    assert not hasattr(module, "_hf_hook")
    assert not hasattr(module, "_old_forward")


def test_a_forward_that_was_replaced_before_comes_back() -> None:
    module = nn.Identity()
    module.forward = lambda x: x + 40
    add_hook_to_module(module, Noting("one", []))
    assert module(torch.ones(1)).item() == 84
    remove_hook_from_module(module)
    assert module(torch.ones(1)).item() == 41


def test_a_forward_that_raises_ends_all_hooks_that_have_begun() -> None:
    class Failing(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            raise KeyError

    events: list[str] = []
    module = nn.Linear(2, 2)
    add_hook_to_module(module, Noting("first", events))
    with pytest.raises(RuntimeError, match="shape"):
        module(torch.ones(1, 3))
    add_hook_to_module(module, Failing(), append=True)
    with pytest.raises(KeyError):
        module(torch.ones(1, 2))
    assert events == ["first before", "first failed"] * 2


def test_no_grad_of_a_hook_counts_also_among_others() -> None:
    class Frozen(ModelHook):
        no_grad = True

    module = nn.Linear(2, 2)
    add_hook_to_module(module, Frozen())
    assert not module(torch.ones(1, 2)).requires_grad
    add_hook_to_module(module, Noting("other", []), append=True)
    assert not module(torch.ones(1, 2)).requires_grad


def test_a_module_with_a_hook_can_be_copied_and_pickled_and_each_has_its_own() -> None:
    module = nn.Linear(2, 2)
    add_hook_to_module(module, Noting("one", []))
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        nn.init.zeros_(made.weight)
        nn.init.ones_(made.bias)
        assert made(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]
        assert module(torch.ones(1, 2)).tolist() != [[2.0, 2.0]]
        assert made._hf_hook.events == ["one before", "one after"]


def test_an_offloading_hook_copied_by_its_attributes_has_the_weights_of_its_new_module() -> None:
    """As peft copies hooks for modules that it saves, and transformers for new embeddings."""
    layer, inputs = Layer(4), torch.ones(1, 4)
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, place_submodules=True))
    attributes = layer._hf_hook.__dict__
    known = inspect.signature(AlignDevicesHook.__init__).parameters
    another = Layer(4)
    want = another(inputs)
    add_hook_to_module(another, AlignDevicesHook(**{name: attributes[name] for name in attributes if name in known}))
    assert torch.equal(another(inputs), want)
    wider = nn.Linear(7, 7)
    add_hook_to_module(wider, layer._hf_hook)
    assert wider(torch.ones(1, 7)).shape == (1, 7)


def test_a_weights_map_gives_weights_as_in_accelerate() -> None:
    outputs = []
    for library in (accelerate.hooks, hooks):
        module = nn.Linear(2, 2)
        weights = {"weight": torch.eye(2) * 3, "bias": torch.ones(2)}
        hook = library.AlignDevicesHook(execution_device="cpu", offload=True, weights_map=weights)
        library.add_hook_to_module(module, hook)
        outputs.append(module(torch.ones(1, 2)))
        assert hook.weights_map["bias"].tolist() == [1.0, 1.0]
        library.remove_hook_from_module(module)
        assert module.weight.tolist() == [[3.0, 0.0], [0.0, 3.0]]
    assert torch.equal(*outputs)


def test_a_weights_map_set_while_the_weights_are_there_changes_them() -> None:
    """As peft merges adapters."""
    module = nn.Linear(2, 2)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))
    module._hf_hook.pre_forward(module)
    module._hf_hook.weights_map = {"weight": torch.eye(2), "bias": torch.zeros(2)}
    module._hf_hook.post_forward(module, torch.tensor([]))
    assert module(torch.tensor([[1.0, 2.0]])).tolist() == [[1.0, 2.0]]


def test_weights_without_numbers_and_of_another_shape_are_named() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="bias of a Linear"):
        add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map={"weight": torch.eye(2)}))
    with pytest.raises(ValueError, match=r"\(2, 2\),.* \(3, 3\)"):
        add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map={"weight": torch.eye(3)}))


def test_what_a_module_fills_stays_the_object_of_its_caller() -> None:
    class Caching(nn.Module):
        def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
            cache.append(x)
            return x

    module, cache = Caching(), [torch.zeros(1)]
    add_hook_to_module(module, AlignDevicesHook("cpu"))
    module(torch.ones(1), cache=cache)
    assert len(cache) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_casting_keeps_weights_small_and_computes_large(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    big_modeling.attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, skip_modules_pattern="2")
    if fails:
        with pytest.raises(RuntimeError):
            model[0](torch.ones(1, 3))
    else:
        assert model(torch.ones(1, 4)).dtype is torch.float32
    assert [model[at].weight.dtype for at in range(3)] == [torch.bfloat16, torch.float32, torch.float32]


def test_casting_computes_as_accelerates() -> None:
    from accelerate.big_modeling import attach_layerwise_casting_hooks

    outputs = []
    for attach in (attach_layerwise_casting_hooks, big_modeling.attach_layerwise_casting_hooks):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(2, 4, 1), nn.GroupNorm(2, 4), nn.ConvTranspose1d(4, 2, 2), nn.Linear(4, 4))
        attach(model, torch.float16, torch.float32, skip_modules_classes=(nn.Linear,))
        outputs.append(model(torch.ones(1, 2, 3)))
    assert torch.equal(*outputs)
