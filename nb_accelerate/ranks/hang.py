"""Says who waits for whom when nothing moves any more.

A cell that trains for an hour without printing is no hang. Ranks that wait in a collective while another rank has
ended the cell, or is somewhere else and stays there, are one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nb_accelerate.diagnostics.stacks import DUMP_SIGNAL, where
from nb_accelerate.diagnostics.waits import who_waits
from nb_accelerate.display.words import label

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.ranks.request import Turn

QUIET = 3.0
"""Seconds without output or answers after which ranks are asked where they are."""

_ANSWER = 0.3
"""Seconds the stacks take to arrive."""


class HangWatch:
    """Watches one cell; lives in the pool's thread. `act` when `due`."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._asked = False
        self._seen: Mapping[int, str] = {}
        self._said = False
        self.due = time.monotonic() + QUIET

    def moved(self) -> None:
        """Something came from a rank."""
        if not self._asked:
            self.due = time.monotonic() + QUIET

    def act(self) -> None:
        """Ask, or look at what was answered."""
        turn = self._turn
        if turn.stage is not None:  # it is being ended already
            self.due = float("inf")
        elif not self._asked:
            self._asked = True
            self.due = time.monotonic() + _ANSWER
            for member in turn.waiting:
                member.stacks.clear()
                member.handle.signal(DUMP_SIGNAL)
        else:
            self._asked = False
            self.due = time.monotonic() + QUIET
            dumps = {member.rank: bytes(member.stacks).decode(errors="replace") for member in turn.waiting}
            places = {rank: where(dump) for rank, dump in dumps.items()}
            finished = sorted(turn.answers)
            if (finished or places == self._seen) and not self._said:
                text = verdict(dumps, finished)
                if text:
                    self._said = True
                    turn.say(text)
            self._seen = places


def verdict(dumps: Mapping[int, str], finished: list[int]) -> str:
    """Who waits for whom, or "" if nobody waits in vain.

    Args:
        dumps: stacks of the ranks that are still busy, by rank.
        finished: ranks that have ended the cell.
    """
    waits = who_waits(dumps)
    waiting, elsewhere = waits.waiting, waits.elsewhere
    if not waiting or (not finished and not elsewhere and len(waiting) == 1):
        return ""
    parts = [f"{label(ranks)} wait{_s(ranks)} {place}" for place, ranks in waiting.items()]
    parts += [f"{label(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}" for place, ranks in elsewhere.items()]
    if finished:
        parts.append(f"{label(finished)} ha{_s(finished) or 've'} ended the cell")
    return f"nothing has moved for {QUIET:g} s: {'; '.join(parts)}. Interrupt the cell to go on; variables are kept"


def _s(ranks: list[int]) -> str:
    return "s" if len(ranks) == 1 else ""
