"""Send many small tensors as one: as the bytes they are made of.

Bytes have no dtype, so one collective carries a whole structure, and dtypes that a backend does not know
(complex, float8) travel as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

SMALL = 1 << 20  # bytes; above, the copy into one buffer costs more than a collective of its own
_WIDEST = 16  # bytes of the widest dtype, complex128


def packed(tensors: Sequence[Tensor], carry: Callable[[Tensor], Tensor], *leading: int) -> list[Tensor]:
    """Carry small tensors together and large ones by themselves.

    Args:
        tensors: what to carry; on every rank the same shapes and dtypes, or the bytes get mixed up.
        carry: a collective that takes a flat tensor of n numbers, which it may change, and returns one of shape
            (*leading, n).
        leading: the dimensions that ``carry`` puts in front; none or one.

    Returns:
        For each tensor its counterpart of shape (*leading, *tensor.shape). Small ones may share memory.
    """
    results: list[Tensor] = list(tensors)
    together: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if len(tensors) > 1 and tensor.nbytes <= SMALL:
            together.setdefault(tensor.device, []).append(index)
        else:
            flat = tensor.detach().reshape(-1)
            if not leading and flat.data_ptr() == tensor.data_ptr():
                flat = flat.clone()  # what is broadcast is written into; what is gathered is not
            results[index] = _restored(carry(flat.view(torch.uint8)), tensor, leading)
    for indices in together.values():
        _carry_together(results, indices, carry, leading)
    return results


def _restored(carried: Tensor, tensor: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Return bytes that were carried as numbers, in the shape of the tensor that they were made of."""
    if not tensor.numel():  # no view of no bytes has another dtype
        return tensor.new_empty((*leading, *tensor.shape))
    return carried.view(tensor.dtype).reshape((*leading, *tensor.shape))


def _carry_together(
    tensors: list[Tensor], indices: list[int], carry: Callable[[Tensor], Tensor], leading: tuple[int, ...]
) -> None:
    """Replace tensors by what comes of carrying them as one.

    Those of one dtype lie together, the widest dtype first, so that each begins at a place that its dtype can be
    read from. That needs two operations per dtype and two per tensor.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index in indices:
        by_dtype.setdefault(tensors[index].dtype, []).append(index)
    groups = sorted(by_dtype.items(), key=lambda item: -item[0].itemsize)
    pieces = [torch.cat([tensors[index].detach().reshape(-1) for index in members]) for _, members in groups]
    rows = [piece.view(torch.uint8) for piece in pieces]
    size = sum(len(row) for row in rows)
    if leading and size % _WIDEST:  # rows of other ranks follow, and have to begin at such a place too
        rows.append(rows[0].new_empty(_WIDEST - size % _WIDEST))
    carried = carry(rows[0] if len(rows) == 1 else torch.cat(rows))
    end = 0
    for (dtype, members), row in zip(groups, rows, strict=False):
        start, end = end, end + len(row)
        if start == end:
            for index in members:
                tensors[index] = _restored(row, tensors[index], leading)
            continue
        parts = torch.split(carried[..., start:end].view(dtype), [tensors[index].numel() for index in members], dim=-1)
        for index, part in zip(members, parts, strict=True):
            tensors[index] = part.reshape((*leading, *tensors[index].shape))
