"""Rehearse in the process of a test, without a launch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.topology import Topology
from nb_accelerate.training.rehearsal.rank import rehearse_ranks
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
    capacity: int = 0,
) -> Rehearsal:
    """Rehearse ranks of many, the first and the last by default."""
    topologies = [Topology.of_machine(rank % world_size, world_size) for rank in ranks]
    traces = rehearse_ranks(functools.partial(function, *args), topologies, str(folder), seconds, capacity=capacity)
    return Rehearsal(tuple(traces), world_size, seconds)
