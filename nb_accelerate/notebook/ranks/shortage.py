"""Say what ranks held in memory when it did not suffice on one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.errors.out_of_memory import bytes_wanted, says_out_of_memory
from nb_accelerate.notebook.display.memory import shortage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.protocol.messages import ErrorReport
    from nb_accelerate.notebook.ranks.proxy import RankProxy


def shortage_on(rank: RankProxy, ranks: Sequence[RankProxy], report: ErrorReport | None = None) -> str:
    """Return who held what, and what to turn on; "" if memory did suffice, or no rank has prepared a model.

    Args:
        ranks: all of them. Their progress pages are read, so this is for the loop's thread.
        report: what it raised; None if it was killed because memory did not suffice.
    """
    if report is not None and not says_out_of_memory(report.type_name, report.message):
        return ""
    wanted = 0 if report is None else bytes_wanted(report.message)
    return shortage({one.rank: one.handle.page.read() for one in ranks}, failed=rank.rank, wanted=wanted)
