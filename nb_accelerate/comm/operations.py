"""What users call: gather, reduce, broadcast and pad whole structures. Written once, on `Collectives`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from nb_accelerate.comm.packing import packed
from nb_accelerate.config.checks import check_choice
from nb_accelerate.errors import CannotPadNestedTensorWarning
from nb_accelerate.pytree import map_tensors, tensors_in

if TYPE_CHECKING:
    from torch import Tensor

    from nb_accelerate.comm.collectives import Collectives, ReduceOp


def gather(collectives: Collectives, data: Any) -> Any:
    """Return ``data`` with every tensor replaced by those of all ranks, one after the other along dimension 0.

    Tensors without dimensions become tensors of shape (world_size,). One process gets back what it gave.

    Args:
        collectives: how.
        data: a tensor, or a structure of tensors, of the same shapes on all ranks.

    Raises:
        TypeError: something in ``data`` is not a tensor.
    """
    tensors = tensors_in(data, strict=True)
    if collectives.world_size == 1:
        return data
    collectives.verify("gather", data, tensors)
    rows = [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]
    gathered = packed(rows, collectives.all_gather, collectives.world_size)
    return _put_back(data, [tensor.flatten(0, 1) for tensor in gathered])


def reduce(collectives: Collectives, data: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return ``data`` with every tensor replaced by its sum, mean or largest over ranks. ``data`` is not changed.

    Args:
        collectives: how.
        data: a tensor, or a structure of tensors, of the same shapes on all ranks.
        reduction: ``"sum"``, ``"mean"``, ``"max"`` (of each element) or ``"none"``. The mean of whole numbers is a
            float32 tensor.
        scale: what the result is multiplied with.

    Raises:
        ConfigError: ``reduction`` is none of these.
        TypeError: something in ``data`` is not a tensor.
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
    together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        together.setdefault((tensor.dtype, tensor.device), []).append(index)
    reduced: list[Tensor] = list(tensors)
    for indices in together.values():
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
    """Return ``data`` with every tensor replaced by that of rank ``from_process``.

    Args:
        collectives: how.
        data: a tensor, or a structure of tensors, of the same shapes on all ranks.
        from_process: whose tensors.

    Raises:
        TypeError: something in ``data`` is not a tensor.
    """
    tensors = tensors_in(data, strict=True)
    if collectives.world_size == 1:
        return data

    collectives.verify("broadcast", data, tensors, waits=False)

    def carry(flat: Tensor) -> Tensor:
        return collectives.broadcast(flat, from_process)

    return _put_back(data, packed(tensors, carry))


def copy_from_owner(collectives: Collectives, tensor: Tensor | None) -> Tensor:
    """Return, on every rank, the tensor that one of them has. The others need not know its form.

    Args:
        collectives: how.
        tensor: the tensor on one rank, None on all others.

    Raises:
        ValueError: no rank has it, or several have.
    """
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise TypeError(f"copy_tensor_to_devices was given a {type(tensor).__name__}. Give it a tensor, or None.")
    looks = collectives.all_gather_object(None if tensor is None else (tuple(tensor.shape), tensor.dtype))
    owners = [rank for rank, look in enumerate(looks) if look is not None]
    if len(owners) != 1:
        who = f"ranks {', '.join(map(str, owners))} have" if owners else "no rank has"
        raise ValueError(
            f"copy_tensor_to_devices copies the tensor of one rank to all, and {who} one. Give None on all others."
        )
    shape, dtype = looks[owners[0]]
    sent = torch.empty(shape, dtype=dtype, device=collectives.device) if tensor is None else tensor.detach()
    return packed([sent.to(collectives.device)], lambda flat: collectives.broadcast(flat, owners[0]))[0]


def gather_object(collectives: Collectives, items: Sequence[Any]) -> list[Any]:
    """Return the items of all ranks in one list, in rank order.

    Args:
        collectives: how.
        items: what this rank gives; anything that can be pickled.

    Raises:
        TypeError: ``items`` is not a list or another sequence of items.
    """
    if isinstance(items, (str, bytes)) or not isinstance(items, Sequence):
        raise TypeError(
            f"gather_object was given a {type(items).__name__}, but joins lists. "
            "Write gather_object([item]) for one item."
        )
    return [item for part in collectives.all_gather_object(list(items)) for item in part]


def broadcast_object_list(collectives: Collectives, items: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of a list by those of rank ``from_process``, in place, and return the list.

    Args:
        collectives: how.
        items: a list of the same length on all ranks; anything that can be pickled.
        from_process: whose items.
    """
    items[:] = collectives.broadcast_objects(items, from_process)
    return items


def pad_across_processes(
    collectives: Collectives, data: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
) -> Any:
    """Return ``data`` with every tensor padded along ``dim`` to its greatest size on any rank, ready for `gather`.

    Args:
        collectives: how.
        data: a tensor, or a structure of tensors, alike on all ranks except in the size of ``dim``. Tensors
            without that dimension are left as they are, and so are nested tensors, with a warning.
        dim: which dimension; negative counts from the last.
        pad_index: what to pad with.
        pad_first: pad at the beginning.

    Raises:
        TypeError: something in ``data`` is not a tensor.
    """
    tensors = tensors_in(data, strict=True)
    nested = [tensor.is_nested for tensor in tensors]
    if any(nested):
        warnings.warn(
            "pad_across_processes was given a nested tensor, which has no one size to pad, and left it as it is. Pad "
            "it to a plain tensor first: tensor.to_padded_tensor(0).",
            CannotPadNestedTensorWarning,
            stacklevel=3,
        )
        if collectives.world_size > 1:
            kept = pad_across_processes(
                collectives,
                [t for t, is_nested in zip(tensors, nested, strict=True) if not is_nested],
                dim,
                pad_index,
                pad_first,
            )
            rest = iter(kept)
            return _put_back(
                data, [t if is_nested else next(rest) for t, is_nested in zip(tensors, nested, strict=True)]
            )
    if collectives.world_size == 1 or not tensors:
        return data
    collectives.verify("pad_across_processes", data, tensors, shapes=False)
    sizes = [tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else 0 for tensor in tensors]
    greatest = collectives.all_gather(torch.tensor(sizes)).amax(0).tolist()
    missing = [most - size for most, size in zip(greatest, sizes, strict=True)]
    padded = [
        _pad(tensor, dim, rows, pad_index, first=pad_first) if rows else tensor
        for tensor, rows in zip(tensors, missing, strict=True)
    ]
    return _put_back(data, padded)


def _pad(tensor: Tensor, dim: int, rows: int, value: int, *, first: bool) -> Tensor:
    from_the_end = tensor.dim() - 1 - dim % tensor.dim()  # functional.pad counts dimensions from the last
    amount = (rows, 0) if first else (0, rows)
    return functional.pad(tensor, (0, 0) * from_the_end + amount, value=value)


def _put_back(data: Any, tensors: Sequence[Tensor]) -> Any:
    if type(data) is torch.Tensor:
        return tensors[0]
    queue = iter(tensors)
    return map_tensors(lambda _: next(queue), data)
