"""Attach hooks to the blocks of a model, and to its parts on several devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.utils import parametrize

from nb_accelerate.training.bigmodel.align_hook import AlignDevicesHook
from nb_accelerate.training.bigmodel.device_memory import named_classes
from nb_accelerate.training.bigmodel.hooks import add_hook_to_module
from nb_accelerate.training.bigmodel.offloaded import PrefixedDataset
from nb_accelerate.training.bigmodel.schedule import Schedule
from nb_accelerate.training.bigmodel.sizes import compute_module_sizes
from nb_accelerate.training.bigmodel.tensors import is_cpu, move_tensor, tensor_at, tensor_names, with_index
from nb_accelerate.training.bigmodel.ties import device_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import torch
    from torch import Tensor

    Device = int | str | torch.device


@dataclass
class Block:
    """Weights that come to a device together."""

    name: str
    module: nn.Module
    is_whole: bool  # it cares for the modules in it, too
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
    classes = named_classes(getattr(model, "_no_split_modules", None))
    names = {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module).__name__ in (*classes, *whole_classes)
        # These read weights of their submodules without calling them.
        or isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer))
        or parametrize.is_parametrized(module)
    }
    if not classes:
        names |= _elements_of_largest_list(model)
    return {name for name in names if len(used.get(name, ())) == 1}


def _elements_of_largest_list(model: nn.Module) -> set[str]:
    sizes = compute_module_sizes(model)
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and name in sizes]
    largest = max(lists, key=lambda name: sizes[name], default=None)
    if largest is None:
        return set()
    return {
        f"{largest}.{index}" if largest else str(index) for index, _ in model.get_submodule(largest).named_children()
    }


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward. A list of modules has none."""
    kind: Any = type(module)
    return kind.forward is not nn.Module.forward


def _modules_around(tensor: str) -> list[str]:
    """Return the names of the modules that a tensor is in, outermost first. The model's is empty."""
    parts = tensor.split(".")[:-1]
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: dict[int, dict[torch.device, Tensor]] | None = None,
) -> None:
    """Move the inputs of all modules with weights, and the weights, to a device. Modules that have a hook keep theirs.

    Args:
        module: changed in place, as all modules in it.
        execution_device: where they compute.
        skip_keys: keyword arguments that are not moved.
        preload_module_classes: names of classes of modules whose submodules get no hooks.
        tied_params_map: as for `AlignDevicesHook`.
    """
    if not hasattr(module, "_hf_hook") and module.state_dict():
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: torch.device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: dict[int, dict[torch.device, Tensor]] | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to each block of a module. accelerate attaches one to each module with weights.

    Args:
        module: changed in place.
        execution_device: where the blocks compute.
        offload: whether their weights rest elsewhere.
        weights_map: what the weights are, by their names in the model.
        offload_buffers: as for `AlignDevicesHook`.
        module_name: of the module in the model.
        skip_keys: as for `AlignDevicesHook`.
        preload_module_classes: names of further classes whose modules are one block.
        tied_params_map: as for `AlignDevicesHook`.
    """
    names = tensor_names(module)
    options = {"offload_buffers": offload_buffers, "skip_keys": skip_keys, "tied_params_map": tied_params_map}
    prefixed = None if weights_map is None else PrefixedDataset(weights_map, f"{module_name}." if module_name else "")
    devices = dict.fromkeys(names, execution_device)
    _attach_to_blocks(module, names, devices, offload, prefixed, preload_module_classes or (), options)


def _attach_to_blocks(
    model: nn.Module,
    names: Sequence[str],
    devices: Mapping[str, Any],
    offload: bool,
    weights_map: Mapping[str, Tensor] | None,
    whole_classes: Collection[str],
    options: Mapping[str, Any],
) -> None:
    schedules: dict[Any, Schedule] = {}
    blocks = find_blocks(model, names, devices, whole_classes)
    for block in blocks:
        prefix = f"{block.name}." if block.name else ""
        device = devices[prefix + block.tensors[0]]
        hook = AlignDevicesHook(
            device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            place_submodules=block.is_whole,
            **options,
        )
        hook.names = block.tensors
        # What is beside blocks is there as long as they are: it need not leave, and gradients can go through it.
        stays = any(other.name.startswith(prefix) for other in blocks if other is not block) and not is_cpu(device)
        hook.offload = offload and not stays and any(hook.visits(block.module, name) for name in block.tensors)
        if hook.offload and device is not None:
            hook.schedule = schedules.setdefault(device, Schedule(with_index(device)))
        add_hook_to_module(block.module, hook, append=True)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: torch.device | Mapping[str, torch.device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: dict[int, dict[torch.device, Tensor]] | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to each block of a model whose weights rest elsewhere, and where devices change.

    Args:
        module: the model, changed in place.
        execution_device: where it computes; by names of modules if there are several devices.
        offload: whether weights rest elsewhere; by names of modules likewise.
        weights_map: what the weights are, by their names in the model.
        offload_buffers: as for `AlignDevicesHook`.
        module_name: of the module in the model.
        skip_keys: as for `AlignDevicesHook`.
        preload_module_classes: names of further classes whose modules are one block.
        tied_params_map: as for `AlignDevicesHook`.
    """
    options: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(
                module, execution_device, True, weights_map, offload_buffers, module_name, **options
            )
        else:
            hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **options)
            add_hook_to_module(module, hook)
        return
    prefix = f"{module_name}." if module_name else ""
    computing = _by_entry(execution_device, offload, prefix)
    resting = _by_entry(offload, execution_device, prefix)
    names = [name for name in tensor_names(module) if _entry(name, resting) is not None]
    devices = {name: with_index(device_of(name, computing)) for name in names if _entry(name, computing) is not None}
    staying = {name for name in devices if not resting[_entry(name, resting) or ""]}
    for name in staying:
        move_tensor(module, name, devices[name])
    tied = {id(tensor_at(module, name)) for name in staying}
    visitors = [name for name in devices if name not in staying and id(tensor_at(module, name)) not in tied]
    root = AlignDevicesHook(computing.get(""), io_same_device=not module_name, **options)
    root.names = []  # it moves inputs and outputs
    add_hook_to_module(module, root)
    weights = None if weights_map is None else PrefixedDataset(weights_map, prefix)
    options["offload_buffers"] = offload_buffers
    classes = preload_module_classes or ()
    _attach_to_blocks(module, visitors, devices, True, weights, classes, options)
    _attach_beside_blocks(module, computing, resting, whole_modules(module, devices, classes), options)


def _by_entry(given: Any, other: Any, prefix: str) -> dict[str, Any]:
    """Return values by names in the module; a single value is for all names of the other argument."""
    by_name = given if isinstance(given, Mapping) else dict.fromkeys(other, given)
    return {name.removeprefix(prefix): value for name, value in by_name.items() if f"{name}.".startswith(prefix)}


def _entry(name: str, entries: Mapping[str, Any]) -> str | None:
    """Return the innermost entry that a name is in."""
    while name and name not in entries:
        name = name.rpartition(".")[0]
    return name if name in entries else None


def _attach_beside_blocks(
    model: nn.Module,
    computing: Mapping[str, Any],
    resting: Mapping[str, Any],
    blocks: Collection[str],
    options: Mapping[str, Any],
) -> None:
    """Move the inputs of all modules that are not in a block."""
    # Some are called by others than the module around them, which knows the device: `generate` calls encoders.
    if all(map(is_cpu, computing.values())):
        return
    for name, module in model.named_modules():
        entry = _entry(name, resting)
        inside = any(name.startswith(f"{block}.") for block in blocks)
        if entry is None or inside or hasattr(module, "_hf_hook") or not (is_called(module) and tensor_names(module)):
            continue
        hook = AlignDevicesHook(computing[_entry(name, computing) or ""], **options)
        hook.names = []  # they are there
        add_hook_to_module(module, hook)
