"""Load a checkpoint into a model whose linear layers take 8 or 4 bits, each weight quantised as it is read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.base.config.versions import installed_version, is_installed
from nb_accelerate.errors import CheckpointError, ConfigError, MissingDependencyError
from nb_accelerate.training.bigmodel.device_map import check_device_map, planned_map
from nb_accelerate.training.bigmodel.device_memory import limits_for
from nb_accelerate.training.bigmodel.dispatch import dispatch_model
from nb_accelerate.training.bigmodel.mapped import WeightFiles
from nb_accelerate.training.bigmodel.quantised import is_within, modules_not_to_quantise, replace_linear_layers
from nb_accelerate.training.bigmodel.tensors import set_module_tensor_to_device, with_index
from nb_accelerate.training.bigmodel.ties import device_of, find_tied_parameters, retie_parameters
from nb_accelerate.training.checkpoint.files import load_state_dict
from nb_accelerate.training.checkpoint.model import weight_files

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from nb_accelerate.training.bigmodel.quantised import BnbQuantizationConfig

    DeviceMap = Mapping[str, int | str | torch.device]

logger = logging.getLogger("nb_accelerate")

_LOWEST = "0.47.0"  # the first version of bitsandbytes that computes all of its formats on a CPU too


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: DeviceMap | str | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,  # noqa: ARG001  # files are mapped, so nothing fills the memory
) -> nn.Module:
    """Load a model with weights of linear layers in 8 or 4 bits, for inference or to train adapters on it.

    Each weight is quantised when it is read, so that memory never holds more than one of them in its own size. A
    checkpoint that was saved with quantised weights is loaded as it is.

    Examples:
        ```python
        with init_empty_weights():
            model = Model()
        config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16")
        model = load_and_quantize_model(model, config, weights_location="weights")
        ```

    Args:
        model: changed in place. On ``meta``, or with weights: then these are quantised.
        bnb_quantization_config: how many bits, and what stays as it is.
        weights_location: a file, an index of several, or a folder with either.
        device_map: devices by names of modules, or ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``.
            By default all is on the first GPU, or on the CPU where there is none. Modules of a map with a GPU that are
            on ``"cpu"`` or ``"disk"`` are not quantised.
        no_split_module_classes: names of classes of modules that stay on one device; None for
            ``model._no_split_modules``.
        max_memory: bytes, or text such as ``"10GiB"``, by device.
        offload_folder: for modules on the disk whose weights are in no safetensors file of this dtype.
        offload_state_dict: without effect.

    Returns:
        The model. `torch.nn.Module.state_dict` has the quantised weights with their scales.

    Raises:
        MissingDependencyError: bitsandbytes is not installed, or too old.
        ConfigError: bitsandbytes does not know the device, or the model does not fit on GPUs.
        CheckpointError: there are no weights, or not all of the model.
    """
    config = bnb_quantization_config
    needs = "load_and_quantize_model (the extra nb-accelerate[bitsandbytes])"
    version = installed_version("bitsandbytes")
    if not is_installed("bitsandbytes"):
        raise MissingDependencyError("bitsandbytes", needed_for=needs)
    from packaging.version import Version

    if version is not None and Version(version) < Version(_LOWEST):
        raise MissingDependencyError("bitsandbytes", needed_for=needs, installed=version, lowest=_LOWEST)
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if is_empty and weights_location is None:
        raise CheckpointError("The model has no weights, it is on meta. Give weights_location, a file or a folder.")
    files = weight_files(weights_location) if is_empty and weights_location is not None else []
    placed, kept = map_for(model, config, device_map, no_split_module_classes, max_memory)
    check_device_map(model, placed)
    _check_devices(placed, kept)
    weights = _read(files) if files else dict(model.state_dict())
    tied = find_tied_parameters(model)
    quantised = replace_linear_layers(model, config, kept)
    _fill(model, _Source(weights, tied, str(weights_location)), placed, config, set(quantised))
    flags: Any = model  # which peft looks at
    flags.is_loaded_in_4bit, flags.is_loaded_in_8bit = config.load_in_4bit, config.load_in_8bit
    return dispatch_model(model, placed, offload_dir=offload_folder)


def map_for(
    model: nn.Module,
    config: BnbQuantizationConfig,
    device_map: DeviceMap | str | None,
    no_split: Sequence[str] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
) -> tuple[dict[str, int | str | torch.device], list[str]]:
    """Return a device for each part of a model, and the names of modules that are not quantised."""
    kept = modules_not_to_quantise(model) if config.skip_modules is None else list(config.skip_modules)
    kept += config.keep_in_fp32_modules or []
    if isinstance(device_map, str):
        return _made_map(model, config, device_map, kept, no_split, max_memory), kept
    placed: dict[str, int | str | torch.device] = {**(device_map or {})}
    if device_map is None:
        first = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        placed[""] = torch.device("cpu") if first is None else with_index(first)
    return placed, [*kept, *_visiting(placed)]


def _check_devices(placed: DeviceMap, kept: Sequence[str]) -> None:
    from bitsandbytes import supported_torch_devices

    for module, device in placed.items():
        kind = "disk" if device == "disk" else torch.device(device).type
        if kind not in supported_torch_devices and (not module or not is_within(module, kept)):
            known = ", ".join(sorted(supported_torch_devices))
            raise ConfigError(f"bitsandbytes does not quantise weights on {device!r}, but on {known}.")


def _visiting(placed: DeviceMap) -> list[str]:
    """Return the modules that compute on another device than they rest on."""
    has_gpu = any(device not in ("cpu", "disk") for device in map(str, placed.values()))
    return [name for name, device in placed.items() if str(device) == "disk" or (has_gpu and str(device) == "cpu")]


def _made_map(
    model: nn.Module,
    config: BnbQuantizationConfig,
    device_map: str,
    kept: Sequence[str],
    no_split: Sequence[str] | None,
    max_memory: Mapping[int | str, int | str] | None,
) -> dict[str, int | str | torch.device]:
    dtypes: dict[str, Any] = {
        name: torch.float32 if is_within(name, config.keep_in_fp32_modules or ()) else config.torch_dtype
        for name, _ in model.named_parameters()
        if is_within(name, kept)
    }
    placed = planned_map(
        model,
        limits_for(max_memory),
        device_map,
        no_split_module_classes=no_split,
        dtype=config.target_dtype,
        special_dtypes=dtypes,
    )
    visiting = [name for name in _visiting(placed) if not is_within(name, kept)]
    if visiting:
        raise ConfigError(
            f"{', '.join(visiting[:3])} would be off the GPUs, where quantised weights cannot be. Write device_map "
            "with a device for each module: those on 'cpu' or 'disk' then stay in torch_dtype. Or use fewer bits."
        )
    return {**placed}


def _read(files: Sequence[Any]) -> Mapping[str, Tensor]:
    if all(file.suffix == ".safetensors" for file in files):
        return WeightFiles(files)
    return {name: tensor for file in files for name, tensor in load_state_dict(file).items()}


class _Source:
    """Weights by name, also by the other names of tied ones."""

    def __init__(self, weights: Mapping[str, Tensor], tied: Sequence[Sequence[str]], where: str) -> None:
        self.weights = weights
        self._tied = {name: group for group in tied for name in group}
        self._where = where

    def __getitem__(self, name: str) -> Tensor:
        saved = next((other for other in (name, *self._tied.get(name, ())) if other in self.weights), None)
        if saved is None:
            raise CheckpointError(f"{self._where} has no weight {name}, which the model needs.")
        return self.weights[saved]


def _fill(
    model: nn.Module, source: _Source, placed: DeviceMap, config: BnbQuantizationConfig, quantised: set[str]
) -> None:
    """Give all weights their values, their numbers and their device."""
    tied = find_tied_parameters(model)
    for name, now in model.state_dict(keep_vars=True).items():
        owner, _, last = name.rpartition(".")
        if not isinstance(now, torch.Tensor):  # the extra state of a module
            continue
        device = _resting_device(name, placed)
        if owner in quantised and last == "weight":
            _fill_quantised(model.get_submodule(owner), name, source, device, config)
            continue
        dtype: Any = config.torch_dtype
        if any(part in name for part in config.keep_in_fp32_modules or ()):
            dtype = torch.float32
        set_module_tensor_to_device(model, name, device, value=source[name], dtype=dtype, clear_cache=False)
    for name, _ in list(model.named_buffers()):  # also buffers that no file has
        set_module_tensor_to_device(model, name, _resting_device(name, placed), clear_cache=False)
    retie_parameters(model, tied)


def _resting_device(name: str, placed: DeviceMap) -> int | str | torch.device:
    device = device_of(name, placed)
    return "cpu" if device == "disk" else device


def _fill_quantised(
    layer: Any, name: str, source: _Source, device: int | str | torch.device, config: BnbQuantizationConfig
) -> None:
    """Quantise a weight; or take it as it is if its scales are beside it, as in a state dict of quantised layers."""
    value, scales = source[name], source.weights.get(f"{name.removesuffix('weight')}SCB")
    states = {other: source.weights[other] for other in source.weights if other.startswith(f"{name}.")}
    is_as_before = bool(states) if config.load_in_4bit else scales is not None
    if not value.is_floating_point() and not is_as_before:
        raise CheckpointError(
            f"{name} has numbers of {value.dtype}, without scales for {4 if config.load_in_4bit else 8} bits. It was "
            "saved with weights in another number of bits: load it with the configuration that it was saved with."
        )
    kind: Any = type(layer.weight)
    if value.is_floating_point():
        set_module_tensor_to_device(layer, "weight", device, value=value, dtype=config.torch_dtype, clear_cache=False)
    elif config.load_in_4bit:
        layer.weight = kind.from_prequantized(value, states, device=device, module=layer)
    elif scales is not None:
        # Not by way of `to`, with which older versions of bitsandbytes quantise once more.
        weight = value.to(device)
        layer.weight = kind(weight, requires_grad=False, CB=weight, SCB=scales.to(device))
