"""Walk through nested lists, tuples, named tuples, mappings and dataclasses that hold tensors.

Two functions, `tensors_in` and `map_tensors`, visit tensors in the same order, so that what is done to a list of
all tensors at once (one collective, say) can be put back in place.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def map_tensors(function: Callable[[Any], Any], data: Any, *, strict: bool = False, movable: bool = False) -> Any:
    """Return ``data`` with every tensor replaced by ``function(tensor)``; containers are new, the rest is kept.

    Containers keep their types: named tuples, ordered and default dicts, dataclasses, and mappings with
    attributes of their own such as a tokenizer's ``BatchEncoding``.

    Args:
        function: called with each tensor, depth first, in the order of the containers.
        data: any structure.
        strict: refuse leaves that are not tensors.
        movable: call ``function`` with other objects that have a ``to`` method as well, instead of looking inside.

    Raises:
        TypeError: with ``strict``, a leaf is not a tensor.
    """
    kind = type(data)
    if kind is Tensor:
        return function(data)
    if kind is dict:
        return {key: map_tensors(function, value, strict=strict, movable=movable) for key, value in data.items()}
    if kind is list:
        return [map_tensors(function, value, strict=strict, movable=movable) for value in data]
    if kind is tuple:
        return tuple([map_tensors(function, value, strict=strict, movable=movable) for value in data])
    if isinstance(data, Tensor) or (movable and is_movable(data)):
        return function(data)
    if isinstance(data, tuple):
        items = [map_tensors(function, value, strict=strict, movable=movable) for value in data]
        return kind(*items) if hasattr(data, "_fields") else kind(items)
    if isinstance(data, list):
        return kind([map_tensors(function, value, strict=strict, movable=movable) for value in data])
    if isinstance(data, Mapping):
        return _map_mapping(function, data, strict=strict, movable=movable)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        changed = copy.copy(data)
        for field in dataclasses.fields(data):
            # Works for frozen dataclasses and for fields that the constructor does not take.
            value = map_tensors(function, getattr(data, field.name), strict=strict, movable=movable)
            object.__setattr__(changed, field.name, value)
        return changed
    if strict:
        raise TypeError(
            f"found a {kind.__name__} ({str(data)[:60]!r}) where only tensors, and containers of tensors, can be"
        )
    return data


def _map_mapping(function: Callable[[Any], Any], data: Mapping[Any, Any], *, strict: bool, movable: bool) -> Any:
    mapped = {key: map_tensors(function, value, strict=strict, movable=movable) for key, value in data.items()}
    if not isinstance(data, MutableMapping):
        return mapped
    changed = copy.copy(data)  # keeps default factories and the attributes of BatchEncoding and its like
    for key, value in mapped.items():
        changed[key] = value
    return changed


def tensors_in(data: Any, *, strict: bool = False) -> list[Tensor]:
    """Return the tensors of ``data`` in the order in which `map_tensors` visits them.

    Raises:
        TypeError: with ``strict``, a leaf is not a tensor.
    """
    if type(data) is Tensor:
        return [data]
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, data, strict=strict)
    return found


def find_batch_size(data: Any) -> int | None:
    """Return the number of rows of the first tensor that has rows, or None if there is none."""
    return next((tensor.shape[0] for tensor in tensors_in(data) if tensor.dim()), None)


def is_movable(data: Any) -> bool:
    """Whether an object moves itself to a device, as graphs, packed sequences and a tokenizer's encodings do."""
    return not isinstance(data, type) and callable(getattr(data, "to", None))


def is_half(tensor: Tensor) -> bool:
    """Whether a tensor holds 16-bit floating point numbers."""
    return tensor.dtype is torch.float16 or tensor.dtype is torch.bfloat16
