"""Find tied parameters (one tensor under several names), tie them again, and look names up in device maps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from torch import nn

logger = logging.getLogger("nb_accelerate")


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of tied parameters, one list for each tensor with several names."""
    return _same(model.named_parameters(remove_duplicate=False))


def find_shared_tensors(model: nn.Module) -> list[list[str]]:
    """Return the names of tied parameters as `find_tied_parameters`, and of buffers that modules share."""
    return find_tied_parameters(model) + _same(model.named_buffers(remove_duplicate=False))


def _same(named: Iterable[tuple[str, torch.Tensor]]) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Tie parameters again after they were replaced one by one.

    Args:
        model: changed in place.
        tied_params: the result of `find_tied_parameters`, from before. All names of a group get the first parameter
            that is not on ``meta``.
    """
    for group in tied_params:
        owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in group]
        values = [getattr(owner, name) for owner, name in owners]
        shared = next((value for value in values if value.device.type != "meta"), None)
        if shared is None:
            continue
        for owner, name in owners:
            setattr(owner, name, shared)


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model is one of transformers, which is not imported for that."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether config or classes of a transformers model tie weights. False for other models."""
    if not is_of_transformers(model):
        return False
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    embeddings = getattr(text, "tie_word_embeddings", False) and model.get_output_embeddings() is not None  # type: ignore[operator]
    both = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return bool(embeddings or both or any(hasattr(part, "_tie_weights") for part in model.modules()))


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, int | str | torch.device]
) -> None:
    """Log a warning for tied parameters that a device map puts on several devices, which would untie them.

    Args:
        tied_params: the result of `find_tied_parameters`.
        device_map: devices by names of modules.

    Raises:
        ConfigError: the device map has no device for a parameter.
    """
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            logger.warning(
                "Tied parameters are on different devices: %s. Give their modules the same device in device_map, or "
                "write device_map='auto'.",
                devices,
            )


def device_of(
    name: str,
    device_map: Mapping[str, int | str | torch.device],
    default: int | str | torch.device | None = None,
) -> int | str | torch.device:
    """Return the device of a tensor: the device of the innermost enclosing module that a device map names.

    Args:
        device_map: devices by names of modules and tensors; ``""`` is the whole model.
        default: the device if the map names no such module.

    Raises:
        ConfigError: the map names no such module, and there is no default.
    """
    module = name
    while module and module not in device_map:
        module = module.rpartition(".")[0]
    device = device_map.get(module, default)
    if device is None:
        raise ConfigError(f"device_map has no device for {name}. Add one for it, for a module around it, or for ''.")
    return device


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the entries of a state dict that belong to given modules, under their full names.

    Args:
        state_dict: of a model.
        submodule_names: full names of modules or tensors.
    """
    return {
        name: tensor
        for module in submodule_names
        for name, tensor in state_dict.items()
        if name == module or name.startswith(f"{module}.")
    }
