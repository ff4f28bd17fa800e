"""Tell who waits for whom when ranks have waited for a while, and end a request whose ranks would do so for ever.

A rank that waits in a collective while another one is elsewhere in its code, or has finished, may be right: the other
sorts, reads a disk, or has a thread that brings the rest. So it is told who waits where, and that is all. A request is
ended only where nobody is left who could come: see `DeadlockWatch`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nb_accelerate.base.topology.rank_lists import label
from nb_accelerate.errors import DeadlockError
from nb_accelerate.notebook.diagnostics.stacks import has_one_thread, in_exchange, main_thread, where, who_waits
from nb_accelerate.notebook.ranks.steps import ask_for_stacks
from nb_accelerate.notebook.ranks.timeouts import NEVER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.notebook.protocol.messages import Frame
    from nb_accelerate.notebook.ranks.proxy import RankProxy
    from nb_accelerate.notebook.ranks.request import Request
    from nb_accelerate.notebook.ranks.timeouts import Timeouts

# Part of its time that a rank which only waits spends on a processor, at most. Its threads wake up now and then.
_MAX_PROCESSOR_SHARE = 0.05

_MAX_PROCESSOR_SECONDS = 0.05  # seconds on a processor that do not count, for short times


class DeadlockWatch:
    """Measures for how long the ranks of a request have been deadlocked.

    They are if each rank of the group either waits in a collective or runs no code of users, if no thread of users
    lives in any of them, and if no process of any rank uses a processor, wants one or reads a disk, as a backward
    would. Where a thread lives, or two ranks wait in different collectives, a program may be right: it is not ended.

    It is not measured with ranks on other machines, in a group that may have processes of another launch, or where
    ranks use devices: waits for those may take no time of a processor.
    """

    def __init__(self, request: Request, *, longest: float) -> None:
        self._request = request
        self._longest = longest
        self._seconds = 0.0
        self._measured_at: float | None = None
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        self._processor_times: dict[int, float | None] = {}

    def moved(self) -> None:
        self._seconds, self._measured_at, self._stacks = 0.0, None, {}

    def measure(self, dumps: Mapping[int, str], others: Sequence[RankProxy]) -> float | None:
        """Return the seconds since the deadlock began; None if there is none, or a rank has not sent its stacks.

        Args:
            dumps: stacks of the ranks that have not come to the end. "" is none: a busy machine answers late.
        """
        stacks = [*dumps.values(), *(rank.dump for rank in others if not rank.is_gone)]
        if "" in stacks:
            self._measured_at = None
            return None
        if not self._can_be(dumps, others) or not all(map(has_one_thread, stacks)):
            self.moved()
            return None
        now = time.monotonic()
        since_last = 0.0 if self._measured_at is None else min(now - self._measured_at, self._longest)
        stacks_by_rank = {rank: main_thread(dump) for rank, dump in dumps.items()}
        processor_times = {rank.rank: rank.handle.processor_time() for rank in (*self._request.waiting, *others)}
        if stacks_by_rank == self._stacks and self._are_idle(processor_times, self._seconds + since_last):
            self._seconds += since_last
        else:
            self._seconds, self._stacks, self._processor_times = 0.0, stacks_by_rank, processor_times
        self._measured_at = now
        return self._seconds

    def _can_be(self, dumps: Mapping[int, str], others: Sequence[RankProxy]) -> bool:
        request = self._request
        return (
            request.on_host
            and bool(dumps and others)
            and len(dumps) + len(others) == request.world_size
            and all(in_exchange(dump, or_backward=True) for dump in dumps.values())
            and not any(rank.handle.page.read().other_group for rank in (*request.ranks, *others))
        )

    def _are_idle(self, processor_times: Mapping[int, float | None], seconds: float) -> bool:
        allowed = _MAX_PROCESSOR_SHARE * seconds + _MAX_PROCESSOR_SECONDS
        for rank, after in processor_times.items():
            before = self._processor_times.get(rank)
            if before is None or after is None or not 0.0 <= after - before <= allowed:
                return False
        return True


# Seconds without movement after which ranks are asked for their stacks, however slowly they move otherwise.
_LONGEST_QUIET = 60.0

_DEADLOCK_CHECKS = 6  # how often stacks are read, at least, before a request is ended as deadlocked


class HangWatch:
    """Watches the ranks of one request. The loop's thread calls `act` when it is due.

    Once nothing has come from the ranks for ``quiet`` seconds and their progress pages have not changed either, they
    are asked for their stacks. If some have waited for others for ``told`` seconds that is told, once. Ranks that move
    slowly, or compute for long in one place, are asked less and less often: each answer takes some of their time. If
    they show for ``deadlock`` seconds that the ranks wait for ever, the request fails with a `DeadlockError`.
    """

    def __init__(self, request: Request, timeouts: Timeouts) -> None:
        self._request = request
        self._timeouts = timeouts
        self._quiet = timeouts.quiet
        self._moved_at: float | None = None
        self._has_asked = False
        self._last_locations: Mapping[int, str] = {}
        self._waiting_since: float | None = None
        self._has_told_wait = False
        self._stuck_since: float | None = None
        self._has_told_stuck = False
        longest = timeouts.deadlock / (_DEADLOCK_CHECKS - 1) + timeouts.stacks
        self._deadlock = DeadlockWatch(request, longest=longest)
        self._progress: tuple[object, ...] | None = None
        self.due = time.monotonic() + timeouts.quiet / 2  # when the progress pages are read for the first time

    def printed(self) -> None:
        """Note that a rank has printed something. Other progress is read from the progress pages."""
        now = time.monotonic()
        self._note_movement(now)
        self._deadlock.moved()
        if not self._has_asked:
            self.due = now + self._quiet

    def act(self) -> None:
        """Read the progress pages, ask the ranks for their stacks, or read the stacks that have come."""
        request, now = self._request, time.monotonic()
        # Nothing to watch once the request is being ended; else stacks that were asked for are read, or pages are
        # compared with the last reading, and ranks that show no progress are asked for their stacks.
        if request.step is not None:
            self.due = NEVER
        elif self._has_asked:
            self._has_asked = False
            is_deadlocked = self._read_stacks(now)
            pauses = [self._quiet]
            if is_deadlocked:
                pauses.append(self._timeouts.deadlock / _DEADLOCK_CHECKS)
            if self._stuck_since is not None and not self._has_told_stuck:
                pauses.append(max(0.0, self._stuck_since + self._timeouts.told - now))
            if self._waiting_since is not None and not self._has_told_wait:
                pauses.append(max(0.0, self._waiting_since + self._timeouts.told - now))
            self.due = now + min(pauses)
        elif self._progress is None:
            self._progress = self._read_progress()
            self.due = now + self._quiet / 2
        elif (progress := self._read_progress()) != self._progress:
            self._progress = progress
            self._note_movement(now)
            self._deadlock.moved()
            self._stuck_since = None
            self.due = now + self._quiet
        else:
            self._has_asked = True
            self.due = now + self._timeouts.stacks
            for rank in (*request.waiting, *self._others()):
                ask_for_stacks(rank)

    def _note_movement(self, now: float) -> None:
        """Raise ``quiet`` to twice the longest pause between two movements. The time before the first is start-up."""
        if self._moved_at is not None:
            self._quiet = max(self._quiet, min(2 * (now - self._moved_at), _LONGEST_QUIET))
        self._moved_at = now

    def _read_progress(self) -> tuple[object, ...]:
        samples = (rank.handle.page.read() for rank in self._request.ranks)
        return tuple((sample.loop, sample.step, sample.collectives, sample.bars) for sample in samples)

    def _others(self) -> list[RankProxy]:
        """Return the ranks of the group that have come to the end, or do not run this."""
        answered = [rank for rank in self._request.ranks if rank.rank in self._request.answers]
        return [*answered, *(self._request.idle() if self._request.attended else ())]

    def _read_stacks(self, now: float) -> bool:
        """Read the stacks, and return whether the ranks seem to wait for ever."""
        request = self._request
        dumps = {rank.rank: rank.dump for rank in request.waiting}
        locations = {rank: where(dump) for rank, dump in dumps.items()}
        finished = sorted(request.answers)
        deadlock_seconds = self._deadlock.measure(dumps, self._others())
        # Idle ranks are named only if all others are in a collective: one that is in backward may be computing.
        idle: list[int] = []
        if request.attended and all(map(in_exchange, dumps.values())):
            idle = [rank.rank for rank in request.idle()]
        text = verdict(dumps, finished, idle)
        if not all(in_exchange(dump, or_backward=True) for dump in dumps.values()):
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since >= self._timeouts.told and not self._has_told_stuck:
            self._has_told_stuck = True
            request.stuck()
        if locations != self._last_locations or not text:
            self._waiting_since = now if text else None
        if deadlock_seconds is not None and deadlock_seconds >= self._timeouts.deadlock:
            reason = f"{request.wording.what} would never end: {text or sentence(dumps, finished, idle)}"
            reason = f"{reason}. All ranks have to call the same collectives"
            request.abandon(DeadlockError(reason, stacks=dict(dumps)))
        elif self._waiting_since is not None and not self._has_told_wait:
            if now - self._waiting_since >= self._timeouts.told:
                self._has_told_wait = True
                self._say(text, now - self._waiting_since, ends_by_itself=deadlock_seconds is not None)
        elif locations == self._last_locations and deadlock_seconds is None:
            self._quiet = max(self._quiet, min(2 * self._quiet, _LONGEST_QUIET))
        self._last_locations = locations
        return deadlock_seconds is not None

    def _say(self, text: str, seconds: float, *, ends_by_itself: bool) -> None:
        request = self._request
        outcome = ""
        if ends_by_itself:
            outcome = f"Nobody is left who could come: it ends by itself after {self._timeouts.deadlock:g} s"
        # The panel counts the seconds by itself.
        if request.panel is None or not request.panel.tell_hang(f"{text}.", outcome and f"{outcome}."):
            request.say(f"{text}; for {round(seconds, 1):g} s so far" + (outcome and f". {outcome}"))


def verdict(dumps: Mapping[int, str], finished: Sequence[int], idle: Sequence[int] = ()) -> str:
    """Return who waits for whom, as a sentence without its end; "" if nobody waits for another rank."""
    waiting, elsewhere = who_waits(dumps)
    if not waiting or (not finished and not idle and not elsewhere and len(waiting) == 1):
        return ""
    return sentence(dumps, finished, idle)


def sentence(dumps: Mapping[int, str], finished: Sequence[int], idle: Sequence[int] = ()) -> str:
    """Return where the ranks are, as a sentence without its end. The arguments are those of `verdict`."""
    waiting, elsewhere = who_waits(dumps)
    parts = [f"{label(ranks)} wait{'s' if len(ranks) == 1 else ''} {place}" for place, ranks in waiting.items()]
    parts += [f"{label(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}" for place, ranks in elsewhere.items()]
    if finished:
        parts.append(f"{label(finished)} {'has' if len(finished) == 1 else 'have'} finished")
    if idle:
        parts.append(f"{label(idle)} {'does' if len(idle) == 1 else 'do'} not run this")
    return "; ".join(parts)
