"""Keep ranks, and run one cell after the other on them: the functions behind ``%%distributed``, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.pool.handle import CellHandle
from nb_accelerate.notebook.pool.options import CellOptions, PoolOptions
from nb_accelerate.notebook.pool.pool import Pool
from nb_accelerate.notebook.pool.source import read_cell
from nb_accelerate.notebook.ranks.status import RankStatus

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
    """Return the pool of this notebook, started or not."""
    return _pool


def start(num_processes: int | None = None, **options: Any) -> None:
    """Start the ranks.

    Args:
        num_processes: number of ranks; None for one for each GPU, or two on a machine without GPUs.
        options: other fields of `PoolOptions`, such as ``devices="cpu"``.

    Raises:
        PoolError: they run already.
        ConfigError: an option has a value that cannot be.
    """
    _pool.start(PoolOptions(num_processes=num_processes, **options))


def run(code: str, *, wait: bool = True, **options: Any) -> list[Any] | CellHandle:
    """Run code on the ranks, which are started if there are none.

    Args:
        code: as in a cell.
        wait: False returns at once.
        options: fields of `CellOptions`.

    Returns:
        The value of the last expression on each rank; with ``wait=False`` a `CellHandle`.

    Raises:
        SyntaxError: the code does not compile; nothing was run.
        BaseException: what it raised on a rank.

    Examples:
        >>> run("rank * 10")
        [0, 10]
    """
    source = read_cell(code)
    if not _pool.has_ranks:
        _pool.start()
    chosen = CellOptions(**{"wants_values": True, **options})
    return _pool.run(source, chosen) if wait else CellHandle(_pool, _pool.begin(source, chosen))


def push(values: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
    """Define variables on the ranks, also where cells have bound them there.

    A module of yours, which is sent by its name, is reloaded from its file there.

    Args:
        values: by name.
        ranks: the ranks; None for all.

    Raises:
        ShippingError: a value cannot be pickled; the text says which part.
        TooLargeError: the values have more than a GiB.
        PoolError: no ranks are running.
    """
    _pool.push(values, ranks)


def pull(*names: str, ranks: Sequence[int] | None = None) -> list[Any]:
    """Return the value that a variable has on each rank.

    Args:
        names: of one variable, or several.
        ranks: the ranks; None for all.

    Returns:
        A list by rank: of values, or, for several names, of lists of values in the order of the names.

    Raises:
        NameError: a rank has no such variable.
        ShippingError: a value cannot be pickled.
        PoolError: no ranks are running.
    """
    values = _pool.pull(names, ranks)
    return [of_rank[0] for of_rank in values] if len(names) == 1 else values


def interrupt() -> None:
    """Interrupt the cell that runs. The ranks keep their variables; without a running cell nothing happens."""
    _pool.interrupt()


def restart(rank: int | None = None) -> None:
    """Restart all ranks, or replace one and all that have ended. The others keep their variables then.

    Args:
        rank: the one to replace; None for all.

    Raises:
        PoolError: no ranks are running.
        ConfigError: there is no such rank.
    """
    _pool.restart(rank)


def status() -> list[RankStatus]:
    """Return the state of every rank; an empty list if there are none."""
    return _pool.status() if _pool.has_ranks else []


def stop() -> None:
    """End every rank. Their variables are lost."""
    _pool.stop()
