"""Find the part of an object that cannot be pickled.

Pickle's own message names a type ("cannot pickle '_thread.lock' object") and leaves the search to the reader. This
descends into what failed, one level at a time, and stops at the smallest part that still fails alone.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ShippingError
from nb_accelerate.notebook.protocol.counterparts import stays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_MAX_DEPTH = 20  # levels to descend, at most
_USERS = (Exception, SystemExit)  # what users' methods that pickling calls may raise

# Methods by which the attributes of an object are pickled.
_TAKES_ATTRIBUTES: tuple[Any, ...] = (object.__reduce__, BaseException.__reduce__)


def find_unpicklable(
    value: object, name: str, parts: Mapping[str, object], error: BaseException, dumps: Callable[[Any], bytes]
) -> tuple[str, str, str, ShippingError | None]:
    """Find the smallest part of a value that cannot be pickled.

    Args:
        parts: what the value is made of that has names of its own.

    Returns:
        Its path (``args[0].lock``), a short description, the reason, and that error if it is of this package.
    """
    for part_name, part in parts.items():
        failure = _failure(part, dumps)
        if failure is not None:
            name, value, error = part_name, part, failure
            break
    path = name
    seen = {id(value)}
    try:
        for _ in range(0 if stays(value) else _MAX_DEPTH):
            for step, part in _parts(value):
                if id(part) in seen:
                    continue
                failure = _failure(part, dumps)
                if failure is not None:
                    seen.add(id(part))
                    path, value, error = path + step, part, failure
                    break
            else:
                break
            if stays(value):
                break
    except _USERS:  # its attributes, or the texts of its keys, cannot be had: then this is as near as one can come
        pass
    return path, _describe(value), _reason(error), error if isinstance(error, ShippingError) else None


def _failure(value: object, dumps: Callable[[Any], bytes]) -> BaseException | None:
    try:
        dumps(value)
    except _USERS as error:
        return error
    return None


def _reason(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except _USERS:
        return type(error).__name__


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    """Yield what `value` refers to when it is pickled by value, each with the step to it as a reader would write it."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (("{...}", part) for part in value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, type):
        yield from ((f".{key}", part) for key, part in vars(value).items() if not key.startswith("__"))
    # An object with a `__reduce__` of its own is left out: what that gives or refuses need not be its attributes.
    elif not isinstance(value, types.ModuleType) and type(value).__reduce__ in _TAKES_ATTRIBUTES:
        yield from ((f".{key}", part) for key, part in getattr(value, "__dict__", {}).items())


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f" -> variable {variable!r} of the enclosing function", cell.cell_contents
        except ValueError:  # an empty cell: the name is not bound yet
            continue
    for used in _global_names(function.__code__):
        if used in function.__globals__:
            yield f" -> global {used!r}", function.__globals__[used]
    yield from ((f" -> default {part!r}", part) for part in function.__defaults__ or ())
    yield from ((f".{key}", part) for key, part in vars(function).items())


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _describe(value: object) -> str:
    if isinstance(value, (types.FunctionType, type)):
        return f"{value.__qualname__!r}"
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"an object of type {kind!r}"
