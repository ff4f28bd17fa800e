"""Format the state of the ranks as a table. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.notebook.display.words import size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.notebook.ranks.status import RankStatus

_BEFORE = ("rank", "pid", "device", "memory")
_HELD = ("peak", "parameters", "gradients", "optimizer")
"""Columns that are there when ranks have prepared models."""
_AFTER = ("state", "now")


def status_table(ranks: Sequence[RankStatus], places: Mapping[int, str]) -> str:
    """Return a table with a row for each rank, and a line about how models are spread over them."""
    has_models = any(one.held.states for one in ranks)
    rows = [(*_BEFORE, *(_HELD if has_models else ()), *_AFTER)]
    for one in ranks:
        place = one.doing if one.state == "ended" else places.get(one.rank, "")
        held = [one.held.peak, one.held.parameters, one.held.gradients, one.held.optimizer] if has_models else []
        rows.append(
            (
                str(one.rank),
                str(one.pid or ""),
                one.device,
                *(size(number) if number else "" for number in (one.memory, *held)),
                one.state,
                "" if place == "idle" else place,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    sharding = sorted({one.held.sharding for one in ranks if one.held.sharding})
    return "\n".join((*lines, *(f"models: {one}" for one in sharding)))
