"""Look at ranks from outside, also while they run something: they are not interrupted, and need not answer."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import RankMemory
from nb_accelerate.notebook.diagnostics.stacks import where
from nb_accelerate.notebook.protocol.messages import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nb_accelerate.notebook.ranks.proxy import RankProxy
    from nb_accelerate.notebook.ranks.request import Request


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The state of a rank when it was looked at.

    Attributes:
        rank: its rank.
        machine: the name of its machine; "" for this one.
        pid: its process, on the machine where it is, or None while it starts and after it has ended.
        state: ``starting``, ``running``, ``returned``, ``failed`` or ``ended``; of a pool also ``idle``.
        exitcode: once it has ended: exit code, or minus the signal's number.
        device: what it computes on; "" if that is not known.
        memory: bytes of main memory that it holds (RSS); 0 if that was not asked for.
        doing: how it has ended, in words; "" if it has not.
        held: what it held for models and optimizers when that was measured last.
    """

    rank: int
    pid: int | None
    state: str
    machine: str = ""
    exitcode: int | None = None
    device: str = ""
    memory: int = 0
    doing: str = ""
    held: RankMemory = field(default_factory=RankMemory)


def state_of(rank: RankProxy, request: Request) -> str:
    """Return what a rank does about a request, as the ``state`` of a `RankStatus`."""
    answer = request.answers.get(rank.rank)
    if answer is not None:
        return "returned" if isinstance(answer[0], Result) else "failed"
    if rank.is_gone:
        return "ended"
    return "running" if rank.is_ready else "starting"


def status_of(rank: RankProxy, *, busy: bool, device: str) -> RankStatus:
    """Look at the process of a rank of a pool that has not ended."""
    state = "running" if busy else "idle"
    memory = rank.handle.memory()
    held = RankMemory()
    with contextlib.suppress(ValueError):  # it has just ended, and its page was closed
        held = rank.handle.page.read().held
    handle = rank.handle
    return RankStatus(
        rank=rank.rank, machine=handle.machine, pid=handle.pid, device=device, memory=memory, state=state, held=held
    )


def locate_ranks(
    ranks: Mapping[int, RankProxy], busy: set[int], seconds: float, post: Callable[[Callable[[], object]], object]
) -> dict[int, str]:
    """Return for each rank ``"idle"``, ``"ended"``, or where it is in its code. For any thread but the loop's."""
    asked = [rank for number, rank in sorted(ranks.items()) if number in busy and not rank.handle.ended]
    for rank in asked:
        rank.has_stacks.clear()
        post(rank.ask_for_stacks)
    deadline = time.monotonic() + seconds
    for rank in asked:
        rank.has_stacks.wait(max(0.0, deadline - time.monotonic()))
    locations = {number: "ended" if rank.handle.ended else "idle" for number, rank in sorted(ranks.items())}
    locations.update((rank.rank, where(rank.dump)) for rank in asked)
    return locations
