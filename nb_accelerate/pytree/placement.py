"""Move and convert every tensor of a structure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from nb_accelerate.pytree.pytree import is_half, map_tensors

if TYPE_CHECKING:
    import torch


def send_to_device(data: Any, device: torch.device | str | int, *, non_blocking: bool = False) -> Any:
    """Return ``data`` with all tensors on ``device``. Tensors that are there already are not copied.

    Args:
        data: any structure. Objects in it that know how to move themselves (``.to(device)``) do so: graphs, packed
            sequences, a tokenizer's encodings.
        device: where to.
        non_blocking: do not wait for the copy; of use with pinned memory.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        try:
            return leaf.to(device, non_blocking=non_blocking)
        except TypeError:  # a `to` without that argument
            return leaf.to(device)

    return map_tensors(move, data, movable=True)


def to_float32(data: Any) -> Any:
    """Return ``data`` with 16-bit floating point tensors converted to float32; others are kept as they are."""
    if type(data) is Tensor:
        return data.float() if is_half(data) else data
    return map_tensors(lambda tensor: tensor.float() if is_half(tensor) else tensor, data)
