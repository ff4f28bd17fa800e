"""How much memory of each device a model may take."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nb_accelerate.base.devices import CPU, DEVICE_KINDS
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.bigmodel.sizes import compute_module_sizes, convert_file_size_to_int

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch
    from torch import nn

    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.training.bigmodel.sizes import CustomDtype

logger = logging.getLogger("nb_accelerate")

# Devices that have no number. A GPU is one of them where it has the memory of the host.
_NAMED = (*(kind.name for kind in DEVICE_KINDS), "disk")

_ALONE = 0.9  # part of the free memory of a single device that a model may take. The rest is for activations.

# Blocks, or layers of mean size, by which a balanced share exceeds an even one: blocks do not fill a share exactly.
_SLACK = 1.25


class Limits(dict[int | str, int]):
    """Bytes by device that were read and checked, and may be those of another machine."""


def get_max_memory(max_memory: Mapping[int | str, int | str] | None = None) -> dict[int | str, int]:
    """Return the bytes that a model may take of each device, in the order in which devices are filled.

    Args:
        max_memory: bytes, or text such as ``"10GiB"``, by device: a number for a GPU, ``"cpu"``, ``"disk"``.
            None for what is free now on each device of this machine. That starts the driver of each GPU. Text in a
            dict is replaced by the number of bytes.

    Raises:
        ConfigError: a device has another name, or a value is not a size.
    """
    if isinstance(max_memory, Limits):
        return max_memory
    kind = next(kind for kind in DEVICE_KINDS if kind.is_available() and kind.start_runtime is None)
    if max_memory is None:
        return _free_memory(kind)
    limits = read_limits(max_memory)
    count = 0 if kind.is_host else kind.count()
    absent = [device for device in limits if isinstance(device, int) and not 0 <= device < count]
    if absent:
        logger.warning("max_memory names %s, but this process sees %d GPUs.", ", ".join(map(str, absent)), count)
    if isinstance(max_memory, dict):
        max_memory.update(limits)  # transformers compares the numbers that accelerate leaves there
    return limits


def read_limits(max_memory: Mapping[int | str, int | str]) -> dict[int | str, int]:
    """Return the bytes of ``max_memory`` as `get_max_memory` does, for a machine that may be another one."""
    unknown = [device for device in max_memory if not isinstance(device, int) and device not in _NAMED]
    if unknown:
        raise ConfigError(f"max_memory has a device {unknown[0]!r}. Write the number of a GPU, 'cpu' or 'disk'.")
    numbers = sorted(device for device in max_memory if isinstance(device, int))
    devices: list[int | str] = [*numbers, *(name for name in _NAMED if name in max_memory)]
    return {device: convert_file_size_to_int(max_memory[device]) for device in devices}


def _free_memory(kind: DeviceKind) -> dict[int | str, int]:
    host = CPU.memory_left(1)
    if kind.uses_host_memory:
        return {kind.name: host}
    free: dict[int | str, int] = {}
    current = kind.current_device()
    try:
        for number in range(kind.count()):
            kind.set_device(number)
            free[number] = kind.memory_left(1)
    finally:
        kind.set_device(current)
    return {**free, CPU.name: host}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: torch.dtype | CustomDtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | CustomDtype | str] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Return limits with which `infer_auto_device_map` gives each GPU about as much of a model as the others.

    The last GPU keeps its whole limit, so that nothing is offloaded because shares were too small.

    Args:
        model: on any device, also on ``meta``.
        max_memory: as for `get_max_memory`. With None and a single GPU, a tenth of its free memory is left free.
        no_split_module_classes: names of module classes that stay whole.
        dtype: count weights as if they had this dtype, where that makes them smaller.
        special_dtypes: count these tensors, by name, as if they had these dtypes.
        low_zero: give the first GPU what the others cannot take only: it has other work too.

    Raises:
        ConfigError: as `get_max_memory`, or torch has no such dtype.
    """
    limits = dict(limits_for(max_memory))
    gpus = [device for device, limit in limits.items() if device not in ("cpu", "disk") and limit > 0]
    if len(gpus) < 2:
        return limits
    first, *others = gpus
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    share = int(sizes[""] // (len(others) if low_zero else len(gpus))) + _slack(
        model, sizes, named_classes(no_split_module_classes)
    )
    for device in others[:-1] if low_zero else gpus[:-1]:
        limits[device] = min(share, limits[device])
    if low_zero:
        rest = int(sizes[""]) - sum(limits[device] for device in others)
        limits[first] = min(max(0, rest), limits[first])
    return limits


def limits_for(max_memory: Mapping[int | str, int | str] | None) -> dict[int | str, int]:
    """Return what a model may take: as `get_max_memory`, but by default of a single GPU not all."""
    limits = get_max_memory(max_memory)
    gpus = [device for device, limit in limits.items() if device not in ("cpu", "disk") and limit > 0]
    if max_memory is None and len(gpus) == 1:
        limits[gpus[0]] = int(_ALONE * limits[gpus[0]])
    return limits


def _slack(model: nn.Module, sizes: Mapping[str, float], whole: Collection[str]) -> int:
    modules = [(name, module) for name, module in model.named_modules() if name in sizes]
    blocks: dict[str, float] = {}
    for name, module in modules:
        if name and type(module).__name__ in whole:
            blocks.setdefault(type(module).__name__, sizes[name])
    layers = [sizes[name] for name, module in modules if not any(module.children())]
    mean = int(sum(layers) / max(1, len(layers)))
    return int(_SLACK * max([mean, *blocks.values()]))


def named_classes(no_split_module_classes: Collection[str] | str | None) -> tuple[str, ...]:
    """Return names of classes as a tuple; a single name may be given as text."""
    return (
        (no_split_module_classes,) if isinstance(no_split_module_classes, str) else tuple(no_split_module_classes or ())
    )
