"""Refuse arguments that a function does not take, with the name that was meant."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.errors import UnknownArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def suggests_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that calls ``function``, and names the argument that was meant by a misspelt one.

    Its signature is that of ``function``, for ``help()`` and editors too.

    Raises:
        UnknownArgumentError: when it is called with a keyword that ``function`` does not take.
    """
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise UnknownArgumentError(f"{function.__name__} has no argument {name!r}.{suggest(name, known)}")
        return function(*args, **kwargs)

    return call
