"""Run an action on all ranks, and raise on all of them if it fails on one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nb_accelerate.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class GathersObjects(Protocol):
    """`Collectives`, or those of a save in the background."""

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order."""


def run_on_all_ranks(collectives: GathersObjects, action: Callable[[], T]) -> T:
    """Return what ``action`` returns on this rank, when it has ended on all. All ranks call it together.

    A rank that cannot read a file would otherwise leave the others waiting in their next collective. If it failed on
    other ranks only, `CheckpointError` is raised.
    """
    kept: list[T] = []
    gather_from_all_ranks(collectives, lambda: kept.append(action()))
    return kept[0]


def gather_from_all_ranks(collectives: GathersObjects, action: Callable[[], T]) -> list[T]:
    """Return what ``action`` returns on each rank, in rank order: it travels pickled. See `run_on_all_ranks`."""
    error: Exception | SystemExit | None = None
    result: list[T] = []
    try:
        result.append(action())
    except (Exception, SystemExit) as caught:  # the others wait for what this rank says
        error = caught
    told = collectives.all_gather_object((None if error is None else f"{type(error).__name__}: {error}", result))
    if error is not None:
        raise error
    failed = [f"on rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text is not None]
    if failed:
        raise CheckpointError("\n".join(failed))
    return [values[0] for _, values in told]
