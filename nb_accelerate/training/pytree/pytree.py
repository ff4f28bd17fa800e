"""Walk through nested lists, tuples, named tuples, mappings and dataclasses that hold tensors.

`tensors_in` and `map_tensors` visit tensors in the same order, so that what is done to a list of all tensors at once
(one collective, say) can be put back in place.

``torch.utils._pytree`` is not used: it is private, and treats classes that were not registered as leaves, among them
dataclasses, subclasses of list, and mappings such as a tokenizer's ``BatchEncoding``.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nb_accelerate.errors import NotATensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

Rebuild = Callable[["Sequence[Any]"], Any]


def children_of(data: Any) -> tuple[list[Any], Rebuild] | None:
    """Return what is inside a container, and a function that makes another one of such items; None for other objects.

    Containers keep their types, and what mappings such as ``BatchEncoding`` and dataclasses know besides their items.
    Mappings that cannot be changed become dicts.
    """
    kind = type(data)
    if isinstance(data, (list, tuple)):
        return list(data), (lambda items: kind(*items)) if hasattr(data, "_fields") else kind
    if isinstance(data, Mapping) and not isinstance(data, MutableMapping):
        return list(data.values()), lambda items: dict(zip(data, items, strict=True))
    put: Any
    if isinstance(data, MutableMapping):
        names, put = list(data), operator.setitem
        inside = list(data.values())
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        # Works for frozen dataclasses and for fields that the constructor does not take.
        names, put = [field.name for field in dataclasses.fields(data)], object.__setattr__
        inside = [getattr(data, name) for name in names]
    else:
        return None

    def changed(items: Sequence[Any]) -> Any:
        made = copy.copy(data)  # keeps default factories and attributes
        for name, item in zip(names, items, strict=True):
            put(made, name, item)
        return made

    return inside, changed


def map_tensors(function: Callable[[Any], Any], data: Any, *, strict: bool = False, movable: bool = False) -> Any:
    """Return ``data`` with every tensor replaced by ``function(tensor)``; containers are new, see `children_of`.

    Args:
        function: called with each tensor, depth first, in the order of the containers.
        strict: refuse leaves that are not tensors.
        movable: call ``function`` with other objects that have a ``to`` method as well, instead of looking inside.

    Raises:
        NotATensorError: with ``strict``, a leaf is not a tensor.
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
    inside = children_of(data)
    if inside is not None:
        items, rebuild = inside
        return rebuild([map_tensors(function, item, strict=strict, movable=movable) for item in items])
    if strict:
        raise NotATensorError(
            f"found a {kind.__name__} ({str(data)[:60]!r}) where only tensors, and containers of tensors, can be. "
            "Make a tensor of it; gather_object collects any objects of all ranks."
        )
    return data


def tensors_in(data: Any, *, strict: bool = False) -> list[Tensor]:
    """Return the tensors of ``data`` in the order in which `map_tensors` visits them."""
    if type(data) is Tensor:
        return [data]
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(note, data, strict=strict)
    return tensors


def paths_of_tensors(data: Any, path: str = "") -> list[str]:
    """Return the path of each tensor in Python's notation, in the order of `tensors_in`: ``['outputs'][0].logits``.

    ``path`` is the path of ``data`` itself in the whole.
    """
    if isinstance(data, Tensor):
        return [path]
    return [found for where, value in paths_of_children(data, path) for found in paths_of_tensors(value, where)]


def paths_of_children(data: Any, path: str) -> list[tuple[str, Any]]:
    """Return what is inside a container, as `children_of` does, each with its path; nothing for other objects."""
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return [(f"{path}.{name}", value) for name, value in zip(data._fields, data, strict=True)]
    if isinstance(data, (list, tuple)):
        return [(f"{path}[{index}]", value) for index, value in enumerate(data)]
    if isinstance(data, Mapping):
        return [(f"{path}[{key!r}]", value) for key, value in data.items()]
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return [(f"{path}.{field.name}", getattr(data, field.name)) for field in dataclasses.fields(data)]
    return []


def find_batch_size(data: Any) -> int | None:
    """Return the number of rows of the first tensor that has rows, or None if there is none."""
    return next((tensor.size(0) for tensor in tensors_in(data) if tensor.dim()), None)  # nested ones have no shape


def is_movable(data: Any) -> bool:
    """Return whether an object moves itself to a device, as graphs, packed sequences and ``BatchEncoding`` do."""
    return not isinstance(data, type) and callable(getattr(data, "to", None))


def is_half(tensor: Tensor) -> bool:
    """Return whether a tensor holds 16-bit floating point numbers."""
    return tensor.dtype is torch.float16 or tensor.dtype is torch.bfloat16


def send_to_device(data: Any, device: torch.device | str | int, *, non_blocking: bool = False) -> Any:
    """Return ``data`` with all tensors on ``device``. Tensors that are there already are not copied.

    Args:
        data: any structure, which stays as it is. Objects in it that know how to move themselves (``.to(device)``) do
            so: graphs, packed sequences, a tokenizer's encodings.
        non_blocking: do not wait for the copy; of use with pinned memory.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        leaf = copy.copy(leaf)  # encodings and graphs move in place, and the caller may keep them for later
        try:
            return leaf.to(device, non_blocking=non_blocking)
        except TypeError:  # a `to` without that argument
            return leaf.to(device)

    return map_tensors(move, data, movable=True)


def is_on(data: Any, device: torch.device) -> bool:
    """Return whether all tensors of ``data`` are on ``device``, and it has no other objects that move themselves."""
    are_there = True

    def look(leaf: Any) -> Any:
        nonlocal are_there
        are_there = are_there and isinstance(leaf, Tensor) and leaf.device == device
        return leaf

    map_tensors(look, data, movable=True)
    return are_there


def to_float32(data: Any) -> Any:
    """Return ``data`` with 16-bit floating point tensors converted to float32; others are kept as they are."""
    if type(data) is Tensor:
        return data.float() if is_half(data) else data
    return map_tensors(lambda tensor: tensor.float() if is_half(tensor) else tensor, data)
