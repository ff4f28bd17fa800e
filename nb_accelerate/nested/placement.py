"""Move and convert every tensor of a structure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from nb_accelerate.nested.nested import is_half, map_tensors

if TYPE_CHECKING:
    import torch

_CONTAINERS = (dict, list, tuple)


def send_to_device(data: Any, device: torch.device | str | int, *, non_blocking: bool = False) -> Any:
    """Return ``data`` with all tensors on ``device``. Tensors that are there already are not copied.

    Args:
        data: any structure. An object that knows how to move itself (``.to(device)``) does so.
        device: where to.
        non_blocking: do not wait for the copy; of use with pinned memory.
    """
    if type(data) not in _CONTAINERS and not isinstance(data, Tensor) and callable(getattr(data, "to", None)):
        try:
            return data.to(device, non_blocking=non_blocking)
        except TypeError:  # a `to` without that argument, such as a tokenizer's BatchEncoding of older versions
            return data.to(device)
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), data)


def to_float32(data: Any) -> Any:
    """Return ``data`` with 16-bit floating point tensors converted to float32; others are kept as they are."""
    if type(data) is Tensor:
        return data.float() if is_half(data) else data
    return map_tensors(lambda tensor: tensor.float() if is_half(tensor) else tensor, data)
