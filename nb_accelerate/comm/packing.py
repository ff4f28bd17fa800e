"""Send many small tensors as one: as the bytes they are made of.

Bytes have no dtype, so one collective carries a whole structure, and dtypes that a backend does not know
(complex, float8) travel as well.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

SMALL = 1 << 20  # bytes; above, the copy into one buffer costs more than a collective of its own


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a flat uint8 tensor; shares memory where it can."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, like: Tensor, *leading: int) -> Tensor:
    """Return bytes as a tensor of shape (*leading, *like.shape), of the dtype of ``like``."""
    # Not a view: a slice of a buffer may start at an odd byte, or be strided.
    result = torch.empty((*leading, *like.shape), dtype=like.dtype, device=data.device)
    result.view(-1).view(torch.uint8).view(data.shape).copy_(data)
    return result


def packed(tensors: Sequence[Tensor], carry: Callable[[Tensor], Tensor], *leading: int) -> list[Tensor]:
    """Carry small tensors together and large ones by themselves.

    Args:
        tensors: what to carry; on every rank the same shapes and dtypes, or the bytes get mixed up.
        carry: a collective that takes a flat tensor of n numbers and returns one of shape (*leading, n).
        leading: the dimensions that ``carry`` puts in front.

    Returns:
        For each tensor its counterpart of shape (*leading, *tensor.shape).
    """
    results: list[Tensor | None] = [None] * len(tensors)
    together: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if len(tensors) > 1 and tensor.numel() * tensor.element_size() <= SMALL:
            together.setdefault(tensor.device, []).append(index)
        else:
            carried = carry(as_bytes(tensor))
            results[index] = carried.reshape(-1).view(tensor.dtype).view(*leading, *tensor.shape)
    for indices in together.values():
        pieces = [as_bytes(tensors[index]) for index in indices]
        carried = carry(torch.cat(pieces))
        ends = list(accumulate(piece.numel() for piece in pieces))
        for index, piece, end in zip(indices, pieces, ends, strict=True):
            part = carried[..., end - piece.numel() : end]
            results[index] = from_bytes(part, tensors[index], *leading)
    return [result for result in results if result is not None]
