"""Move tensors of modules, and inputs, to devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nb_accelerate.errors import PlacedModelError
from nb_accelerate.training.bigmodel.tensors import set_module_tensor_to_device
from nb_accelerate.training.process import context
from nb_accelerate.training.pytree import map_tensors, send_to_device

if TYPE_CHECKING:
    from collections.abc import Mapping

    Device = int | str | torch.device


def numbered(device: Device) -> torch.device:
    """Return a device with its number, which tensors have too; in a rehearsal the CPU, with that number.

    Raises:
        PlacedModelError: this machine has no such device.
    """
    if (rehearsal := context.rehearsal()) is not None:
        return torch.device(rehearsal.on_cpu(device))
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, TypeError) as error:  # the second by a torch without CUDA
        raise PlacedModelError(
            f"This process sees no device {device!r}: {str(error).splitlines()[0].rstrip('.')}. Name another one, "
            "'cpu' or 'disk', or write device_map='auto'."
        ) from error


def is_cpu(device: Device | None) -> bool:
    """Return whether a device is the CPU, and stands for no other; True for none, where nothing moves."""
    return device is None or numbered(device) == torch.device("cpu")


def move_tensor(module: nn.Module, name: str, device: torch.device, values: Mapping[str, Tensor] | None = None) -> None:
    """Move a tensor of a module to a device; one on ``meta`` gets its value. A parameter stays the same object else."""
    tensor = tensor_at(module, name)
    if type(tensor) is not nn.Parameter or tensor.is_meta:
        value = values[name] if tensor.is_meta and values and name in values else None
        set_module_tensor_to_device(module, name, device, value=value, clear_cache=False)
    elif tensor.device != device:
        tensor.data = tensor.data.to(device)


def tensor_at(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer by its name, which may have dots."""
    owner, attribute = owner_of(module, name)
    tensor: Tensor = getattr(owner, attribute)
    return tensor


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has a tensor, and the name of the tensor there."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def tensor_names(module: nn.Module, *, recurse: bool = True) -> list[str]:
    """Return the names of all parameters and buffers, tied ones by each of their names."""
    parameters = module.named_parameters(recurse=recurse, remove_duplicate=False)
    buffers = module.named_buffers(recurse=recurse, remove_duplicate=False)
    return [name for name, _ in (*parameters, *buffers)]


def moved(data: Any, device: torch.device) -> Any:
    """Return data with its tensors on a device; the same object if they are there, as a cache that the module fills."""
    if type(data) is Tensor:
        return data.to(device)
    if data is None or type(data) is bool:  # most of what a block is called with
        return data
    return data if _is_on(data, device) else send_to_device(data, device)


def _is_on(data: Any, device: torch.device) -> bool:
    there = True

    def look(leaf: Any) -> Any:
        nonlocal there
        there = there and isinstance(leaf, Tensor) and leaf.device == device
        return leaf

    map_tensors(look, data, movable=True)
    return there
