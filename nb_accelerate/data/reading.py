"""Read ahead where the others have to be told if reading fails."""

from __future__ import annotations

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
