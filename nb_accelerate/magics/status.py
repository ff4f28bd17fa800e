"""Format the state of the ranks as a table. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.display.words import size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.ranks.status import RankStatus

_HEAD = ("rank", "pid", "device", "memory", "state", "now")


def status_table(ranks: Sequence[RankStatus], places: Mapping[int, str]) -> str:
    """Return a table with a row for each rank.

    Args:
        ranks: what is known about them.
        places: where each rank is, in a few words, by rank.
    """
    rows = [_HEAD]
    for one in ranks:
        place = one.doing if one.state == "ended" else places.get(one.rank, "")
        rows.append(
            (
                str(one.rank),
                str(one.pid or ""),
                one.device,
                size(one.memory) if one.memory else "",
                one.state,
                "" if place == "idle" else place,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
