"""Gather, reduce, broadcast and pad nested structures of tensors, on any `Collectives`.

Many small tensors travel in one collective, as bytes: so it serves tensors of several dtypes, and dtypes that a backend
does not support (complex, float8).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from nb_accelerate.base.config.checks import check_choice
from nb_accelerate.errors import CannotPadNestedTensorWarning
from nb_accelerate.training.pytree import map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from nb_accelerate.training.comm.collectives import Collectives, ReduceOp

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
        # Replace ``tensors[index]`` for each of ``indices`` by its result, with one collective. Each begins at a
        # multiple of `_ALIGNMENT`, so that its bytes can be viewed as numbers of any dtype.
        rows = [_bytes_of(results[index]) for index in indices]
        padded = [functional.pad(row, (0, -len(row) % _ALIGNMENT)) for row in rows]
        parts = torch.split(collective(torch.cat(padded)), [len(row) for row in padded], dim=-1)
        for index, row, part in zip(indices, rows, parts, strict=True):
            results[index] = _from_bytes(part[..., : len(row)], results[index], leading)
    return results


def _from_bytes(received: Tensor, tensor: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Return bytes as numbers with the dtype of ``tensor``, in shape (*leading, *tensor.shape)."""
    if not tensor.numel():  # torch cannot view 0 bytes as another dtype
        return tensor.new_empty((*leading, *tensor.shape))
    return received.view(tensor.dtype).reshape((*leading, *tensor.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # a column, also of one row, which counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def gather(collectives: Collectives, data: Any) -> Any:
    """Return ``data`` with every tensor replaced by those of all ranks, concatenated along dimension 0.

    A tensor of shape (n, ...) becomes one of shape (world_size * n, ...), a scalar one of shape (world_size,). One
    process gets its argument back. Several get tensors without gradients, with a warning if embeddings, say, had some.
    """
    tensors = tensors_in(data, strict=True)
    if collectives.world_size == 1:
        return data
    collectives.verify("gather", data, tensors)
    rows = [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]
    gathered = communicate_packed(
        rows, collectives.all_gather, collectives.world_size, as_bytes=collectives.packs_bytes
    )
    # Scripts gather losses, which have no or one dimension, for their logs.
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad and tensor.dim() > 1 for tensor in tensors)
    if is_trained and collectives.rank == 0:  # later than the exchange: a warning may be an error
        warnings.warn(
            "gather returns tensors without gradients: a loss that is computed from them does not train what has made "
            "them. For metrics, write gather(tensor.detach()). For a loss over the rows of all processes, put the rows "
            "of this process, which have gradients, in their place there, and multiply the loss by the number of "
            "processes.",
            stacklevel=3,
        )
    return _put_back(data, [tensor.flatten(0, 1) for tensor in gathered])


def reduce(collectives: Collectives, data: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return ``data``, which is not changed, with every tensor replaced by its sum, mean or maximum over ranks.

    ``reduction`` is ``"sum"``, ``"mean"``, ``"max"`` (of each element) or ``"none"``. The mean of integers is a float32
    tensor, unless there is one process: that one gets ``data`` back, multiplied by ``scale``.
    """
    check_choice("reduction", reduction, ("sum", "mean", "max", "none"))
    tensors = tensors_in(data, strict=True)
    if collectives.world_size == 1 or reduction == "none":
        return data if scale == 1.0 else _put_back(data, [tensor * scale for tensor in tensors])
    collectives.verify("reduce", data, tensors)
    reduced = _reduced(collectives, tensors, "max" if reduction == "max" else "sum")
    factor = scale / collectives.world_size if reduction == "mean" else scale
    return _put_back(data, reduced if factor == 1.0 else [tensor * factor for tensor in reduced])


def _reduced(collectives: Collectives, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
    """Reduce over ranks, with one collective for all tensors of a dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(index)
    reduced: list[Tensor] = list(tensors)
    for indices in by_kind.values():
        if len(indices) == 1:
            only = tensors[indices[0]]
            copy = only.detach().clone(memory_format=torch.contiguous_format)
            reduced[indices[0]] = collectives.all_reduce(copy, op)
            continue
        flat = torch.cat([tensors[index].detach().reshape(-1) for index in indices])
        parts = torch.split(collectives.all_reduce(flat, op), [tensors[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            reduced[index] = part.reshape(tensors[index].shape)
    return reduced


def broadcast(collectives: Collectives, data: Any, from_process: int = 0) -> Any:
    """Return ``data`` with every tensor replaced by the tensor of rank ``from_process``."""
    tensors = tensors_in(data, strict=True)
    if collectives.world_size == 1:
        return data
    collectives.verify("broadcast", data, tensors, waits=False)
    return _put_back(data, _sent_from(collectives, tensors, from_process))


def _sent_from(collectives: Collectives, tensors: Sequence[Tensor], source: int) -> list[Tensor]:
    def send(flat: Tensor) -> Tensor:
        return collectives.broadcast(flat, source)

    return communicate_packed(tensors, send, as_bytes=collectives.packs_bytes)


def copy_from_owner(collectives: Collectives, tensor: Tensor | None) -> Tensor:
    """Return, on every rank, the tensor of the one rank that has it. The others give None: they know no shape."""
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise TypeError(f"copy_tensor_to_devices was given a {type(tensor).__name__}. Give it a tensor, or None.")
    specs = collectives.all_gather_object(None if tensor is None else (tuple(tensor.shape), tensor.dtype))
    owners = [rank for rank, spec in enumerate(specs) if spec is not None]
    if len(owners) != 1:
        who = f"ranks {', '.join(map(str, owners))} have" if owners else "no rank has"
        raise ValueError(
            f"copy_tensor_to_devices copies the tensor of one rank to all, and {who} one. Give None on all others."
        )
    shape, dtype = specs[owners[0]]
    sent = torch.empty(shape, dtype=dtype, device=collectives.device) if tensor is None else tensor.detach()
    return _sent_from(collectives, [sent.to(collectives.device)], owners[0])[0]


def gather_object(collectives: Collectives, items: Sequence[Any]) -> list[Any]:
    """Return the items of all ranks, which can be pickled, in one list, in rank order."""
    return [item for part in gather_lists(collectives, items) for item in part]


def gather_lists(collectives: Collectives, items: Sequence[Any]) -> list[list[Any]]:
    """Return the items of each rank, which can be pickled, as a list, in rank order."""
    if isinstance(items, (str, bytes)) or not isinstance(items, Sequence):
        raise TypeError(
            f"gather_object was given a {type(items).__name__}, but joins lists. "
            "Write gather_object([item]) for one item."
        )
    return collectives.all_gather_object(list(items))


def broadcast_object_list(collectives: Collectives, items: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of a list by those of rank ``from_process``, in place, and return the list."""
    items[:] = collectives.broadcast_objects(items, from_process)
    return items


def pad_across_processes(
    collectives: Collectives, data: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
) -> Any:
    """Return ``data`` with every tensor padded along ``dim`` to its greatest size on any rank, ready for `gather`.

    Args:
        data: a tensor, or a structure of tensors, of shapes that differ between ranks in ``dim`` only. Tensors
            without that dimension are returned unchanged, and so are nested tensors, with a warning.
        dim: the dimension to pad; negative counts from the last.
        pad_first: pad at the beginning instead of the end.
    """
    every = tensors_in(data, strict=True)
    tensors = [tensor for tensor in every if not tensor.is_nested]
    if len(tensors) < len(every):
        warnings.warn(
            "pad_across_processes does not pad nested tensors, and returned this one unchanged. Pad it to a plain "
            "tensor first: tensor.to_padded_tensor(0).",
            CannotPadNestedTensorWarning,
            stacklevel=3,
        )
    if collectives.world_size == 1 or not tensors:
        return data
    collectives.verify("pad_across_processes", data if len(tensors) == len(every) else tensors, tensors, shapes=False)
    sizes = [tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else 0 for tensor in tensors]
    greatest = collectives.all_gather(torch.tensor(sizes, device="cpu")).amax(0).tolist()
    padded = []
    for tensor, most, size in zip(tensors, greatest, sizes, strict=True):
        if most > size:
            # functional.pad takes dimensions from the last to the first.
            after = (0, 0) * (tensor.dim() - 1 - dim % tensor.dim())
            amount = (most - size, 0) if pad_first else (0, most - size)
            padded.append(functional.pad(tensor, after + amount, value=pad_index))
        else:
            padded.append(tensor)
    rest = iter(padded)
    return _put_back(data, [tensor if tensor.is_nested else next(rest) for tensor in every])


def _put_back(data: Any, tensors: Sequence[Tensor]) -> Any:
    if type(data) is torch.Tensor:
        return tensors[0]
    queue = iter(tensors)
    return map_tensors(lambda _: next(queue), data)
