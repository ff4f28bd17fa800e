"""Report ranks that wait for one another in vain, and end a request whose ranks would do so forever.

A rank hangs if it waits in a collective while another rank has finished, or stays somewhere else in its code. One that
computes for an hour without printing does not hang. Where all other ranks have finished, or wait in collectives too,
the wait cannot end, so the request is ended after a time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nb_accelerate.diagnostics.stacks import STOPPED, where
from nb_accelerate.diagnostics.waits import in_exchange, who_waits
from nb_accelerate.errors import DeadlockError
from nb_accelerate.ranks.deadlock import DeadlockWatch
from nb_accelerate.ranks.steps import ask_for_stacks
from nb_accelerate.ranks.timeouts import NEVER
from nb_accelerate.topology.rank_lists import label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.ranks.request import Request
    from nb_accelerate.ranks.timeouts import Timeouts


_LONGEST_QUIET = 60.0
"""Seconds without movement after which ranks are asked for their stacks, however slowly they move otherwise."""

_DEADLOCK_LOOKS = 6
"""How often stacks are looked at, at least, before a request is ended as deadlocked."""


class HangWatch:
    """Watches the ranks of one request. The loop's thread calls `act` when it is due.

    Once nothing has come from the ranks for ``quiet`` seconds and their progress pages have not changed either, they
    are asked for their stacks. If those show a hang it is reported, once. Ranks that move slowly, or compute for long
    in one place, are asked less and less often: each answer takes some of their time. If they show for ``deadlock``
    seconds that the ranks wait forever, the request fails with a `DeadlockError`.

    Args:
        request: one that has begun.
        timeouts: its ``quiet``, ``stacks`` and ``deadlock`` are used.

    Attributes:
        due: `time.monotonic` of the next `act`.
    """

    def __init__(self, request: Request, timeouts: Timeouts) -> None:
        self._request = request
        self._timeouts = timeouts
        self._quiet = timeouts.quiet
        self._moved_at: float | None = None
        self._asked = False
        self._seen: Mapping[int, str] = {}
        self._said = False
        longest = timeouts.deadlock / (_DEADLOCK_LOOKS - 1) + timeouts.stacks
        self._deadlock = DeadlockWatch(request, longest=longest)
        self._progress: tuple[object, ...] | None = None
        self.due = time.monotonic() + timeouts.quiet / 2  # when the progress pages are read for the first time

    def printed(self) -> None:
        """Note that a rank has printed something. Other progress is read from the progress pages."""
        now = time.monotonic()
        self._note_movement(now)
        self._deadlock.moved()
        if not self._asked:
            self.due = now + self._quiet

    def act(self) -> None:
        """Read the progress pages, ask the ranks for their stacks, or look at the stacks that have come."""
        request, now = self._request, time.monotonic()
        if request.step is not None:
            self.due = NEVER
        elif self._asked:
            self._asked = False
            waits_in_vain = self._look()
            self.due = now + (
                min(self._quiet, self._timeouts.deadlock / _DEADLOCK_LOOKS) if waits_in_vain else self._quiet
            )
        elif self._progress is None:
            self._progress = self._read_progress()
            self.due = now + self._quiet / 2
        elif self._has_progressed():
            self._note_movement(now)
            self._deadlock.moved()
            self.due = now + self._quiet
        else:
            self._asked = True
            self.due = now + self._timeouts.stacks
            for rank in request.waiting:
                ask_for_stacks(rank)

    def _note_movement(self, now: float) -> None:
        """Raise ``quiet`` to twice the longest pause between two movements. The time before the first is start-up."""
        if self._moved_at is not None:
            self._quiet = max(self._quiet, min(2 * (now - self._moved_at), _LONGEST_QUIET))
        self._moved_at = now

    def _has_progressed(self) -> bool:
        before, self._progress = self._progress, self._read_progress()
        return before != self._progress

    def _read_progress(self) -> tuple[object, ...]:
        samples = (rank.handle.page.read() for rank in self._request.ranks)
        return tuple((one.loop, one.step, one.collectives, one.bars) for one in samples)

    def _look(self) -> bool:
        """Look at the stacks, and return whether the ranks seem to wait forever."""
        request = self._request
        dumps = {
            rank.rank: STOPPED if rank.is_stopped else bytes(rank.stacks).decode(errors="replace")
            for rank in request.waiting
        }
        places = {rank: where(dump) for rank, dump in dumps.items()}
        finished = sorted(request.answers)
        deadlocked = self._deadlock.look(dumps)
        # Idle ranks are blamed only if all others are in a collective: one that is in backward may be computing.
        idle = request.idle() if request.attended and all(map(in_exchange, dumps.values())) else ()
        if finished or places == self._seen:
            text = verdict(dumps, finished, idle)
            if deadlocked is not None and deadlocked >= self._timeouts.deadlock:
                self._end(text or sentence(dumps, finished), dumps)
            elif text and not self._said:
                self._said = True
                self._say(text, ends_by_itself=deadlocked is not None)
            elif places == self._seen and deadlocked is None:
                self._quiet = max(self._quiet, min(2 * self._quiet, _LONGEST_QUIET))
        self._seen = places
        return deadlocked is not None

    def _say(self, text: str, *, ends_by_itself: bool) -> None:
        request = self._request
        outcome = request.wording.when_hung
        if ends_by_itself:
            outcome += f"; if nothing changes for {self._timeouts.deadlock:g} s, it ends by itself"
        # The panel counts the seconds by itself.
        if request.panel is None or not request.panel.tell_hang(f"no rank goes on: {text}.", f"{outcome}."):
            request.say(f"nothing has moved for {round(self._quiet, 1):g} s: {text}. {outcome}")

    def _end(self, text: str, dumps: Mapping[int, str]) -> None:
        message = f"{self._request.wording.what} would never end: {text}. All ranks have to call the same collectives"
        self._request.abandon(DeadlockError(message, stacks=dict(dumps)))


def verdict(dumps: Mapping[int, str], finished: Sequence[int], idle: Sequence[int] = ()) -> str:
    """Return who waits for whom, as a sentence without its end; "" if nobody waits in vain.

    Args:
        dumps: stacks of the ranks that are still busy, by rank.
        finished: ranks that have come to the end of what they were asked.
        idle: ranks that were asked nothing.
    """
    waits = who_waits(dumps)
    if not waits.waiting or (not finished and not idle and not waits.elsewhere and len(waits.waiting) == 1):
        return ""
    return sentence(dumps, finished, idle)


def sentence(dumps: Mapping[int, str], finished: Sequence[int], idle: Sequence[int] = ()) -> str:
    """Return where the ranks are, as a sentence without its end. The arguments are those of `verdict`."""
    waits = who_waits(dumps)
    waiting, elsewhere = waits.waiting, waits.elsewhere
    parts = [f"{label(ranks)} wait{_s(ranks)} {place}" for place, ranks in waiting.items()]
    parts += [f"{label(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}" for place, ranks in elsewhere.items()]
    if finished:
        parts.append(f"{label(finished)} {'has' if len(finished) == 1 else 'have'} finished")
    if idle:
        parts.append(f"{label(idle)} {'does' if len(idle) == 1 else 'do'} not run this")
    return "; ".join(parts)


def _s(ranks: Sequence[int]) -> str:
    return "s" if len(ranks) == 1 else ""
