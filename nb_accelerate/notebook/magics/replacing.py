"""A new rank in the place of one that has ended: asked for by the user, or offered before a cell that needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.pool.pool import Pool


def replace(pool: Pool, rank: int | None) -> str:
    """Replace a rank and all that have ended, or what `Pool.restart` does; return a line on what they lack."""
    new = pool.restart(rank)
    if rank is None and len(new) == pool.world_size:
        return pool.brief
    lacking = sorted(
        set[str]().union(*(pool.variables.own_names - pool.variables.syncs[rank].own.keys() for rank in new))
    )
    whose = f"rank {new[0]} is" if len(new) == 1 else f"ranks {', '.join(map(str, new))} are"
    return f"{whose} new" + (
        f"; {'it lacks' if len(new) == 1 else 'they lack'} {', '.join(lacking)}" if lacking else ""
    )


def offer(pool: Pool, ranks: Sequence[int] | None) -> str:
    """Ask whether ranks that a cell needs, and that have ended, are to be replaced; gives a line if they were.

    Where nobody can be asked, or the answer is no, nothing happens: the pool then says what to do.
    """
    if not pool.lost:
        return ""
    pool.wait()
    lost = {rank: how for rank, how in pool.lost.items() if ranks is None or rank in ranks}
    if not lost:
        return ""
    ones = ("its variables are", "a new rank in its place") if len(lost) == 1 else ("their variables are", "new ranks")
    question = f"{'; '.join(lost.values())}. {ones[0].capitalize()} lost. Start {ones[1]}, and run this cell? [Y/n] "
    try:
        reply = input(question)
    except (EOFError, NotImplementedError):  # nobody is there, or IPython's StdinNotImplementedError
        return ""
    return replace(pool, min(lost)) if reply.strip().lower() in ("", "y", "yes") else ""
