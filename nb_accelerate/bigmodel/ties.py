"""Weights that a model has under several names: find them, and make them one again."""

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
    """Return the names of parameters that are one and the same, group by group."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Make parameters one and the same again, after they were replaced one by one.

    Args:
        model: changed in place.
        tied_params: what `find_tied_parameters` returned before. The first of each group that has numbers, and is not
            on ``meta``, counts.
    """
    for group in tied_params:
        places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in group]
        source = next((value for place, name in places if (value := getattr(place, name)).device.type != "meta"), None)
        if source is None:
            continue
        for place, name in places:
            setattr(place, name, source)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether a model of transformers is made to have tied weights, by its config or its classes."""
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    embeddings = getattr(text, "tie_word_embeddings", False) and model.get_output_embeddings() is not None  # type: ignore[operator]
    both = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return bool(embeddings or both or any(hasattr(part, "_tie_weights") for part in model.modules()))


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, int | str | torch.device]
) -> None:
    """Warn of tied parameters that a device map sends to several devices, where they would be copies.

    Args:
        tied_params: what `find_tied_parameters` returned.
        device_map: devices by the names of modules.

    Raises:
        ConfigError: the device map says nothing about a parameter.
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
    """Return the device of a tensor: that of the innermost module around it that a device map names.

    Raises:
        ConfigError: it names none, and there is no default.
    """
    part = name
    while part and part not in device_map:
        part = part.rpartition(".")[0]
    device = device_map.get(part, default)
    if device is None:
        raise ConfigError(f"device_map has no device for {name}. Add one for it, for a module around it, or for ''.")
    return device


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the entries of a state dict that belong to some modules, under their full names.

    Args:
        state_dict: of a model.
        submodule_names: modules, or single weights.
    """
    return {
        name: tensor
        for module in submodule_names
        for name, tensor in state_dict.items()
        if name == module or name.startswith(f"{module}.")
    }
