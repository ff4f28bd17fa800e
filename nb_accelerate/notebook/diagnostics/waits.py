"""Tell from their stacks which ranks wait for others, and where the others are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.notebook.diagnostics.stacks import main_thread, where

if TYPE_CHECKING:
    from collections.abc import Mapping

_BACKWARD = "/torch/autograd/graph.py"

_COLLECTIVES = (
    "/torch/distributed/",
    _BACKWARD,
    "/torch/nn/parallel/distributed.py",
    "/nb_accelerate/training/comm/",
)
"""Files whose innermost frame waits for others. A backward does, in C++ code: gradients are averaged in it; a forward
of a parallel model, for its buffers; and ours, where a collective runs on the device, for its result."""

_EXCHANGES = ("/torch/distributed/distributed_c10d.py", "/torch/nn/parallel/distributed.py")
"""Files whose innermost frame waits for ranks and for nothing else: the folder of the first also has remote calls,
launchers of processes and writers of checkpoints."""

_WAITS_WITH_AN_END = ("init_process_group", "new_group", "monitored_barrier")
"""Functions of torch.distributed that wait for processes outside of a launch too, or for a shorter time."""


def who_waits(dumps: Mapping[int, str]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return which ranks are inside a collective and which elsewhere, each by the place, by their stacks."""
    waiting: dict[str, list[int]] = {}
    elsewhere: dict[str, list[int]] = {}
    for rank, dump in sorted(dumps.items()):
        frames = main_thread(dump)
        in_collective = bool(frames) and any(part in frames[0].filename for part in _COLLECTIVES)
        (waiting if in_collective else elsewhere).setdefault(where(dump), []).append(rank)
    return waiting, elsewhere


def in_exchange(dump: str, *, or_backward: bool = False) -> bool:
    """Return whether the main thread of a rank is where it can only wait for other ranks, until they come.

    Args:
        or_backward: a backward counts too: it may wait for gradients of other ranks, or compute.
    """
    frames = main_thread(dump)
    files = (*_EXCHANGES, _BACKWARD) if or_backward else _EXCHANGES
    return (
        bool(frames)
        and frames[0].filename.endswith(files)
        and not any(frame.name in _WAITS_WITH_AN_END for frame in frames)
    )
