"""The blocks of a model: modules whose weights come to a device together, when the module begins to compute.

::

    whole modules (a layer of a transformer)   all their offloaded weights: one block
    what is beside them (embedding, norm)      a block for each module that owns weights
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.utils import parametrize

from nb_accelerate.training.bigmodel.device_memory import named_classes
from nb_accelerate.training.bigmodel.sizes import compute_module_sizes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import torch


@dataclass
class Block:
    """Weights that come to a device together.

    Args:
        name: of the module that computes with them, in the model.
        module: that module.
        is_whole: whether it cares for the modules in it, too.
        tensors: names of the weights in that module.
    """

    name: str
    module: nn.Module
    is_whole: bool
    tensors: list[str] = field(default_factory=list)


def find_blocks(
    model: nn.Module,
    tensors: Iterable[str],
    devices: Mapping[str, torch.device],
    whole_classes: Collection[str] = (),
) -> list[Block]:
    """Return the blocks that tensors of a model are in, in the order of the tensors.

    A block is an outermost module of the model's ``_no_split_modules``, or an element of the largest ``ModuleList`` if
    it has no such classes; beside these, the module that owns a tensor, or the one that computes with it.

    Args:
        model: of any kind.
        tensors: their names in the model.
        devices: where each tensor of the model is computed with, by name. A module is whole only if all of its tensors
            are on one device.
        whole_classes: names of further classes of modules that stay whole.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    whole = whole_modules(model, devices, whole_classes)
    blocks: dict[str, Block] = {}
    for name in tensors:
        around = [module for module in _modules_around(name) if is_called(modules[module])]
        chosen = next((module for module in around if module in whole), around[-1])
        block = blocks.setdefault(chosen, Block(chosen, modules[chosen], chosen in whole))
        block.tensors.append(name[len(chosen) + 1 :] if chosen else name)
    return list(blocks.values())


def whole_modules(model: nn.Module, devices: Mapping[str, torch.device], whole_classes: Collection[str]) -> set[str]:
    """Return the names of the modules of a model that are one block if their weights are offloaded."""
    used: dict[str, set[torch.device]] = {}
    for name, device in devices.items():
        for module in _modules_around(name):
            used.setdefault(module, set()).add(device)
    return {name for name in _by_classes_or_list(model, whole_classes) if len(used.get(name, ())) == 1}


def _by_classes_or_list(model: nn.Module, whole_classes: Collection[str]) -> set[str]:
    classes = named_classes(getattr(model, "_no_split_modules", None))
    by_class = {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module).__name__ in (*classes, *whole_classes) or _computes_with_parts(module)
    }
    return by_class if classes else by_class | _elements_of_largest_list(model)


def _elements_of_largest_list(model: nn.Module) -> set[str]:
    sizes = compute_module_sizes(model)
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and name in sizes]
    largest = max(lists, key=lambda name: sizes[name], default=None)
    if largest is None:
        return set()
    return {
        f"{largest}.{index}" if largest else str(index) for index, _ in model.get_submodule(largest).named_children()
    }


def _computes_with_parts(module: nn.Module) -> bool:
    """Return whether a module reads weights of its submodules without calling them."""
    return isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) or parametrize.is_parametrized(
        module
    )


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward. A list of modules has none."""
    kind: Any = type(module)
    return kind.forward is not nn.Module.forward


def _modules_around(tensor: str) -> list[str]:
    """Return the names of the modules that a tensor is in, outermost first. The model's is empty."""
    parts = tensor.split(".")[:-1]
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
