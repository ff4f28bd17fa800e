"""What ranks are and do, seen from outside: they need not be idle, and are not disturbed."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from nb_accelerate.diagnostics.stacks import DUMP_SIGNAL, is_whole, where

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.ranks.proxy import Member

_ANSWER = 0.5
"""Seconds a rank has to write its stacks."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """A rank, as it is now.

    Attributes:
        rank: its number.
        pid: its process.
        device: what it computes on.
        memory: bytes of main memory it holds.
        state: ``idle``, ``running``, ``stopped`` (SIGSTOP) or ``ended``.
        doing: where it is, if it runs a cell.
    """

    rank: int
    pid: int | None
    device: str
    memory: int
    state: str
    doing: str = ""


def info(rank: int, member: Member | None, *, busy: bool, lost: str) -> RankInfo:
    """A row of the status.

    Args:
        rank: its number.
        member: the rank, or None if it is gone.
        busy: it runs a cell.
        lost: how it ended, if it has.
    """
    if member is None or member.is_gone:
        return RankInfo(rank=rank, pid=None, device="", memory=0, state="ended", doing=lost)
    state, memory = "running" if busy else "idle", 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(member.handle.pid)
        memory = process.memory_info().rss
        if process.status() == psutil.STATUS_STOPPED:
            state = "stopped"
    return RankInfo(rank=rank, pid=member.handle.pid, device=member.device, memory=memory, state=state)


def whereabouts(members: Mapping[int, Member], busy: set[int]) -> dict[int, str]:
    """Where ranks are in their code, in a few words."""
    asked = [member for rank, member in sorted(members.items()) if rank in busy and not member.handle.ended]
    for member in asked:
        member.stacks.clear()
        member.handle.signal(DUMP_SIGNAL)
    deadline = time.monotonic() + _ANSWER
    while time.monotonic() < deadline and not all(is_whole(member.stacks) for member in asked):
        time.sleep(0.01)  # the pool's thread reads, and knows no end of a dump
    found = {rank: "ended" if member.handle.ended else "idle" for rank, member in sorted(members.items())}
    found.update((member.rank, where(bytes(member.stacks).decode(errors="replace"))) for member in asked)
    return found
