"""Read on: where the others have to be told if that fails, and without the beginning."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")


def failing(error: Exception) -> Iterator[T]:
    """Return what raises an error when the first item is asked for."""
    raise error
    yield


def next_of(items: Iterator[T]) -> tuple[T | None, Exception | None]:
    """Return the next item, or None and what was raised instead; None and None at the end."""
    try:
        return next(items, None), None
    except Exception as error:
        return None, error


def later(items: Iterator[T], start: int, reread: int) -> Iterator[T]:
    """Return the first ``reread`` items, and those from ``start`` on. None is asked for before."""
    return chain(islice(items, reread), islice(items, start - reread, None))
