"""The bytes of a model, by layer and by device, as a table. Equal layers that follow each other are one row."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from nb_accelerate.base.table import Table
from nb_accelerate.base.words import size
from nb_accelerate.training.bigmodel.device_map import check_device_map, planned_map
from nb_accelerate.training.bigmodel.device_memory import limits_for, read_limits
from nb_accelerate.training.bigmodel.ties import device_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import nn


def show_map(
    model: nn.Module,
    device_map: Mapping[str, int | str | torch.device] | str | None = None,
    *,
    max_memory: Mapping[int | str, int | str] | None = None,
) -> Table:
    """Return how many bytes the layers of a model have, and on which device: text, and a table in a cell.

    Args:
        model: placed, on one device, or without weights yet (on ``meta``).
        device_map: devices by names of modules, or a word such as ``"auto"``. None for the devices on which the model
            is; for one without weights it is ``"auto"``.
        max_memory: bytes, or text such as ``"10GiB"``, by device, for a map that is inferred. None for what is free.

    Raises:
        ConfigError: the map has no device for a tensor, or is another word; a size cannot be read.
    """
    placed = getattr(model, "hf_device_map", None)
    if device_map is None and (max_memory is not None or all(weight.is_meta for weight in model.parameters())):
        device_map = placed or "auto"
    if isinstance(device_map, str):
        limits = limits_for(None) if max_memory is None else read_limits(max_memory)
        device_map = planned_map(model, limits, device_map)
    elif device_map is not None:
        check_device_map(model, {name: str(device) for name, device in device_map.items()})
    devices = placed or {} if device_map is None else device_map
    parts: Counter[tuple[str, str]] = Counter()
    totals: Counter[str] = Counter()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor what this rank has
        entry = device_of(name, devices, default=local.device)
        device = f"GPU {entry}" if isinstance(entry, int) else str(entry)
        # The layer of a tensor: ``layers.3`` of ``layers.3.up.weight``, ``head`` of ``head.weight``.
        words = name.split(".")
        numbers = [index for index, word in enumerate(words) if word.isdecimal()]
        parts[".".join(words[: numbers[0] + 1] if numbers else words[:-1] or words), device] += local.nbytes
        totals[device] += local.nbytes
    rows = [*_folded(parts), *(("in all", size(taken), device) for device, taken in totals.items())]
    return Table(("layer", "bytes", "device"), rows, right=("bytes",))


def _folded(parts: Mapping[tuple[str, str], int]) -> Iterator[tuple[str, str, str]]:
    def run_of(numbered: tuple[int, tuple[tuple[str, str], int]]) -> tuple[object, ...]:
        index, ((layer, device), taken) = numbered
        parent, _, number = layer.rpartition(".")
        return (parent, int(number) - index, device, taken) if number.isdecimal() else (index,)

    for _, grouped in itertools.groupby(enumerate(parts.items()), run_of):
        ((first, device), taken), *others = (part for _, part in grouped)
        if others:
            number = others[-1][0][0].rpartition(".")[2]
            yield f"{first}-{number}", f"{len(others) + 1} x {size(taken)}", device
        else:
            yield first, size(taken), device
