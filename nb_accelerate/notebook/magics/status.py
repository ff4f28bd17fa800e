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


def status_table(ranks: Sequence[RankStatus], positions: Mapping[int, str]) -> str:
    """Return a table with a row for each rank, and a line about how models are spread over them."""
    has_models = any(status.held.states for status in ranks)
    rows = [(*_BEFORE, *(_HELD if has_models else ()), *_AFTER)]
    for status in ranks:
        now = status.doing if status.state == "ended" else positions.get(status.rank, "")
        held = status.held
        sizes = [status.memory, *((held.peak, held.parameters, held.gradients, held.optimizer) if has_models else ())]
        memory = [size(number) if number else "" for number in sizes]
        now = "" if now == "idle" else now
        rows.append((str(status.rank), str(status.pid or ""), status.device, *memory, status.state, now))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    sharding = sorted({status.held.sharding for status in ranks if status.held.sharding})
    return "\n".join((*lines, *(f"models: {kind}" for kind in sharding)))
