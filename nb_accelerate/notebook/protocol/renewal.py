"""Bring the state of an object to another process, and give it in place to the object that stands for it there.

In place, because others refer to it: an optimizer to parameters, a trainer to its model.
"""

from __future__ import annotations

import copyreg
import operator
import types
from collections import deque
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.imported import imported
from nb_accelerate.notebook.protocol.content import attributes_of_optimizer

if TYPE_CHECKING:
    from nb_accelerate.notebook.protocol.content import Edit

_REFILLED = (list, dict, set, deque)

_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__module__", "__qualname__", "_abc_impl", "__slots__"})


def is_of_torch(value: object, name: str) -> bool:
    """Return whether a value is of a class of torch, such as ``"nn.Module"``."""
    torch = imported("torch")
    try:
        return torch is not None and issubclass(type(value), operator.attrgetter(name)(torch))
    except AttributeError:  # it is being imported, or is none
        return False


def state_of(value: Any) -> Any:
    """Return what `renew` takes, which can be pickled; None if an object of its type can only be replaced."""
    try:
        return _state_of(value, type(value))
    except Exception:  # users' code takes part. If it cannot be pickled, that is told where it is
        return None


def _state_of(value: Any, kind: type) -> Any:
    if issubclass(kind, _REFILLED):
        return (list(value.items()) if issubclass(kind, dict) else list(value)), getattr(value, "__dict__", None)
    if is_of_torch(value, "Tensor"):
        data = value.detach()
        is_view = data.untyped_storage().nbytes() > data.nbytes
        return data.clone() if is_view else data, value.requires_grad
    if _is_array(value):
        return value[...]
    if issubclass(kind, type):
        return {name: part for name, part in vars(value).items() if not _is_of_class(name, part)}
    if kind is types.FunctionType:
        return value.__defaults__, value.__kwdefaults__, vars(value), value.__closure__
    if pickled_by_torch(value):
        return attributes_of_optimizer(value)
    make, arguments, *rest = value.__reduce_ex__(5)
    if (make, arguments) not in ((copyreg.__newobj__, (kind,)), (kind, ())):  # type: ignore[attr-defined]
        return None
    return (rest and rest[0]) or {}


def pickled_by_torch(value: Any) -> bool:
    """Return whether a value is an optimizer, and torch would pickle only its groups and state."""
    kind: Any = type(value)
    has_own_way = kind.__reduce__ is not object.__reduce__  # a prepared one is pickled as the one inside
    return (
        is_of_torch(value, "optim.Optimizer")
        and not has_own_way
        and kind.__getstate__.__module__ == "torch.optim.optimizer"
    )


def renew(value: Any, state: Any) -> None:
    """Give an object the state that `state_of` has returned for another one."""
    kind = type(value)
    if issubclass(kind, _REFILLED):
        items, attributes = state
        value.clear()
        if issubclass(kind, dict):
            for name, part in items:
                value[name] = part
        elif issubclass(kind, set):
            value.update(items)
        else:
            value.extend(items)
        if attributes is not None:
            vars(value).update(attributes)
    elif is_of_torch(value, "Tensor"):
        _renew_tensor(value, *state)
    elif _is_array(value):
        value[...] = state
    elif issubclass(kind, type):
        for name, part in list(vars(value).items()):
            if name not in state and not _is_of_class(name, part):
                type.__delattr__(value, name)
        for name, part in state.items():
            type.__setattr__(value, name, part)  # an enumeration's own would refuse
    elif kind is types.FunctionType:
        value.__defaults__, value.__kwdefaults__, attributes, closure = state
        vars(value).clear()
        vars(value).update(attributes)
        for cell, new in zip(value.__closure__ or (), closure or (), strict=True):
            cell.cell_contents = new.cell_contents
    elif hasattr(kind, "__setstate__"):
        value.__setstate__(state)
    else:
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        if hasattr(value, "__dict__"):
            vars(value).clear()
            vars(value).update(attributes or {})
        for name, part in (slots or {}).items():
            object.__setattr__(value, name, part)  # a frozen dataclass's own would refuse


def edit(value: Any, change: Edit) -> None:
    """Give an object other settings, and leave all else in it as it is."""
    for name in change.gone:
        holder, key = _holder(value, name)
        holder.pop(key, None)
    for name, part in change.changed.items():
        holder, key = _holder(value, name)
        holder[key] = part


def _holder(value: Any, name: str | tuple[int, str]) -> tuple[dict[str, Any], str]:
    if isinstance(name, str):
        return vars(value), name
    index, key = name
    return value.param_groups[index], key


def _is_of_class(name: str, part: object) -> bool:
    """Return whether an attribute belongs to the class itself, and cannot be given to another one."""
    return name in _OF_CLASSES or issubclass(type(part), (types.MemberDescriptorType, types.GetSetDescriptorType))


def _is_array(value: object) -> bool:
    numpy: Any = imported("numpy")
    return hasattr(numpy, "ndarray") and issubclass(type(value), numpy.ndarray)


def _renew_tensor(value: Any, data: Any, requires_grad: bool) -> None:
    import torch

    with torch.no_grad():
        if value.shape == data.shape:
            value.copy_(data)
        else:
            value.data = data.to(value.device)
    if value.is_leaf:
        value.requires_grad_(requires_grad)
