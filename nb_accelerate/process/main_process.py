"""Do something on some ranks only, or on one rank before the others."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nb_accelerate.topology import Topology

P = ParamSpec("P")
R = TypeVar("R")


def only_if(chosen: bool, function: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that runs ``function`` where ``chosen``, and elsewhere does nothing and returns None."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if chosen else None

    return run


def on_main_process(topology: Topology, function: Callable[P, R]) -> Callable[P, R | None]:
    """Run ``function`` on rank 0 only."""
    return only_if(topology.is_main, function)


def on_local_main_process(topology: Topology, function: Callable[P, R]) -> Callable[P, R | None]:
    """Run ``function`` on the first rank of each machine only."""
    return only_if(topology.is_local_main, function)


def on_last_process(topology: Topology, function: Callable[P, R]) -> Callable[P, R | None]:
    """Run ``function`` on the last rank only."""
    return only_if(topology.is_last, function)


@contextlib.contextmanager
def first(chosen: bool, barrier: Callable[[], None]) -> Iterator[None]:
    """Run the block on ranks where ``chosen`` before all others. All ranks enter it.

    An exception in a chosen rank lets the others go on too: better they fail in their own next collective than
    wait for a rank that left.

    Args:
        chosen: whether this rank is one of the first.
        barrier: returns when all ranks are there.
    """
    if not chosen:
        barrier()
    try:
        yield
    finally:
        if chosen:
            barrier()
