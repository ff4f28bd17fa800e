"""Communicate many small tensors in one collective, as bytes.

One collective is enough for tensors of several dtypes, and dtypes that a backend does not support (complex, float8)
work too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

MAX_PACKED_BYTES = 1 << 20
"""Larger tensors get a collective of their own, which costs less than the copy into one buffer."""

_ALIGNMENT = 16  # bytes of the widest dtype, complex128


def communicate_packed(
    tensors: Sequence[Tensor], collective: Callable[[Tensor], Tensor], *leading: int, as_bytes: bool = True
) -> list[Tensor]:
    """Run a collective on all small tensors at once, and on each large one; return a result for each tensor.

    Tensors have the same shapes and dtypes on all ranks; otherwise bytes get mixed up. ``collective`` takes a tensor of
    shape (n,) and dtype uint8, which it may overwrite, and returns one of shape (*leading, n). Without ``as_bytes`` it
    takes tensors as they are, and overwrites none. Results of small tensors may share memory.
    """
    if not as_bytes:
        return [collective(tensor.detach()) for tensor in tensors]
    results: list[Tensor] = list(tensors)
    small_by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if len(tensors) > 1 and tensor.nbytes <= MAX_PACKED_BYTES:
            small_by_device.setdefault(tensor.device, []).append(index)
        else:
            row = _bytes_of(tensor)
            if not leading and row.data_ptr() == tensor.data_ptr():
                row = row.clone()  # broadcast overwrites its argument, gather does not
            results[index] = _from_bytes(collective(row), tensor, leading)
    for indices in small_by_device.values():
        _replace_packed(results, indices, collective, leading)
    return results


def _from_bytes(received: Tensor, tensor: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Return bytes as numbers with the dtype of ``tensor``, in shape (*leading, *tensor.shape)."""
    if not tensor.numel():  # torch cannot view 0 bytes as another dtype
        return tensor.new_empty((*leading, *tensor.shape))
    return received.view(tensor.dtype).reshape((*leading, *tensor.shape))


def _replace_packed(
    tensors: list[Tensor], indices: list[int], collective: Callable[[Tensor], Tensor], leading: tuple[int, ...]
) -> None:
    """Replace ``tensors[index]`` for each of ``indices`` by its result, with one collective.

    Each begins at a multiple of `_ALIGNMENT`, so that its bytes can be viewed as numbers of any dtype.
    """
    rows = [_bytes_of(tensors[index]) for index in indices]
    padded = [functional.pad(row, (0, -len(row) % _ALIGNMENT)) for row in rows]
    parts = torch.split(collective(torch.cat(padded)), [len(row) for row in padded], dim=-1)
    for index, row, part in zip(indices, rows, parts, strict=True):
        tensors[index] = _from_bytes(part[..., : len(row)], tensors[index], leading)


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # a column, also of one row, which counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
