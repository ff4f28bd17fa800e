"""Rehearse in the process of a test, without a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_accelerate.base.topology import Topology
from nb_accelerate.training.rehearsal.rank import Job, rehearse_ranks
from nb_accelerate.training.rehearsal.report import Rehearsal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def rehearsed(
    function: Callable[..., Any],
    *args: Any,
    folder: Path,
    world_size: int = 4,
    ranks: Sequence[int] = (0, -1),
    seconds: float = 30,
) -> Rehearsal:
    """Rehearse ranks of many, the first and the last by default."""
    (folder / "tape").write_bytes(b"")
    topologies = [Topology.of_machine(rank % world_size, world_size) for rank in ranks]
    job = Job(function=function, args=args, topologies=tuple(topologies), folder=str(folder), seconds=seconds)
    return Rehearsal(tuple(rehearse_ranks(job)), world_size, seconds)
