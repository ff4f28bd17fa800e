"""Do something on some ranks only, or on one rank before the others."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

P = ParamSpec("P")
R = TypeVar("R")


async def _no_value() -> None:
    """Return None."""


async def _no_items() -> AsyncIterator[Any]:
    return
    yield  # makes it a generator


# Kinds of functions, and what a call returns that does nothing.
_NOTHING: tuple[tuple[Callable[[Any], bool], Callable[[], Any]], ...] = (
    (inspect.isasyncgenfunction, _no_items),
    (inspect.isgeneratorfunction, lambda: iter(())),
    (inspect.iscoroutinefunction, _no_value),
)


def only_if(chosen: bool | Callable[[], bool], function: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that runs ``function`` where ``chosen``, and elsewhere does nothing.

    Elsewhere a function returns None, a generator yields nothing and a coroutine gives None, so that callers can
    iterate it or wait for it on every rank. Methods, static methods and class methods work too.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(only_if(chosen, function.__func__))
    here = chosen if callable(chosen) else functools.partial(bool, chosen)
    nothing = next((make for is_kind, make in _NOTHING if is_kind(function)), lambda: None)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if here() else nothing()

    return run


@contextlib.contextmanager
def first(chosen: bool, barrier: Callable[[], None]) -> Iterator[None]:
    """Run the block on ranks where ``chosen`` before all others. All ranks enter it."""
    # An exception in a chosen rank lets the others go on too: better they fail in their own next collective than wait
    # for a rank that left.
    if not chosen:
        barrier()
    try:
        yield
    finally:
        if chosen:
            barrier()
