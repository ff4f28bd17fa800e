"""Do something on some ranks only, or on one rank before the others."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = ParamSpec("P")
R = TypeVar("R")


def only_if(chosen: bool | Callable[[], bool], function: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that runs ``function`` where ``chosen``, and elsewhere does nothing.

    Elsewhere a function returns None, a generator yields nothing and a coroutine gives None; each stays what it is,
    so that callers can iterate it or wait for it on every rank. Methods, static methods and class methods work too.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(only_if(chosen, function.__func__))
    here = chosen if callable(chosen) else functools.partial(bool, chosen)
    if inspect.isasyncgenfunction(function):
        return functools.wraps(function)(_only_async_generator(here, function))
    if inspect.isgeneratorfunction(function):
        return functools.wraps(function)(_only_generator(here, function))
    if inspect.iscoroutinefunction(function):
        return functools.wraps(function)(_only_coroutine(here, function))

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if here() else None

    return run


def _only_generator(here: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if here():
            return (yield from function(*args, **kwargs))
        return None

    return run


def _only_coroutine(here: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs) if here() else None

    return run


def _only_async_generator(here: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        if here():
            async for item in function(*args, **kwargs):
                yield item

    return run


@contextlib.contextmanager
def first(chosen: bool, barrier: Callable[[], None]) -> Iterator[None]:
    """Run the block on ranks where ``chosen`` before all others. All ranks enter it.

    An exception in a chosen rank lets the others go on too: better they fail in their own next collective than
    wait for a rank that left.
    """
    if not chosen:
        barrier()
    try:
        yield
    finally:
        if chosen:
            barrier()
