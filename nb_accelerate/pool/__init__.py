"""Ranks that stay, and run one cell after the other: what ``%%distributed`` does, as functions for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_accelerate.pool.handle import CellHandle
from nb_accelerate.pool.options import CellOptions, PoolOptions
from nb_accelerate.pool.pool import Pool
from nb_accelerate.pool.source import read_cell
from nb_accelerate.ranks.status import RankStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "CellHandle",
    "CellOptions",
    "Pool",
    "PoolOptions",
    "RankStatus",
    "current",
    "interrupt",
    "pull",
    "push",
    "restart",
    "run",
    "start",
    "status",
    "stop",
]

_pool = Pool()


def current() -> Pool:
    """The pool of this notebook, started or not."""
    return _pool


def start(num_processes: int | None = None, **options: Any) -> None:
    """Start ranks; see `PoolOptions` for what else can be chosen.

    Raises:
        PoolError: they run already.
        ConfigError: an option cannot be.
    """
    _pool.start(PoolOptions(num_processes=num_processes, **options))


def run(code: str, *, wait: bool = True, **options: Any) -> list[Any] | CellHandle:
    """Run code on the ranks, which are started if there are none; see `CellOptions` for the options.

    Returns:
        The value of the last expression on each rank. With ``wait=False`` a `CellHandle`.

    Raises:
        SyntaxError: the code does not compile; nothing was run.
        BaseException: what it raised on a rank.

    Example:
        >>> run("rank * 10")
        [0, 10]
    """
    source = read_cell(code)
    if not _pool.is_running:
        _pool.start()
    chosen = CellOptions(**{"wants_values": True, **options})
    return _pool.run(source, chosen) if wait else CellHandle(_pool, _pool.begin(source, chosen))


def push(values: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
    """Define names on the ranks."""
    _pool.push(values, ranks)


def pull(*names: str, ranks: Sequence[int] | None = None) -> list[Any]:
    """The value of a name on each rank; of several names, a list on each."""
    values = _pool.pull(names, ranks)
    return [one[0] for one in values] if len(names) == 1 else values


def interrupt() -> None:
    """Interrupt the cell that runs."""
    _pool.interrupt()


def restart(rank: int | None = None) -> None:
    """Start all ranks anew, or put a new one in the place of one."""
    _pool.restart(rank)


def status() -> list[RankStatus]:
    """What every rank is and does."""
    return _pool.status() if _pool.is_running else []


def stop() -> None:
    """End every rank."""
    _pool.stop()
