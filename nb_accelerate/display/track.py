"""What the samples of one rank, one after the other, say about it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from nb_accelerate.board import Phase, Sample

if TYPE_CHECKING:
    from collections.abc import Mapping

_WINDOW = 4.0
"""Seconds over which a rate is taken."""

_SHORT = 0.4
"""Seconds that say nothing about a rate."""

_LONG = 10.0
"""Seconds over which it is seen what a rank spends its time on."""

_RECENT = 1.5
"""Seconds over which the phase that is shown was the most frequent: what changes faster is no news, but flicker."""

WORDS = {
    Phase.NOTHING: "starting",
    Phase.RUNNING: "running",
    Phase.DATA: "loading data",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.STEP: "optimizer step",
    Phase.EVALUATING: "evaluating",
    Phase.SAVING: "saving",
    Phase.WAITING: "waits",
    Phase.ENDED: "done",
}

_ENOUGH = 20
"""Looks at a rank before something is said about its time."""

_WITH_OTHERS = (Phase.BACKWARD, Phase.WAITING)
"""Phases in which a rank may be waiting for the slowest."""


@dataclass(frozen=True)
class _Moment:
    time: float
    loop: int
    step: int
    phase: Phase


class Track:
    """The recent past of a rank.

    Attributes:
        sample: the newest.
        moved_at: when something last changed.
    """

    def __init__(self, now: float) -> None:
        self.sample = Sample()
        self.moved_at = now
        self._moments: deque[_Moment] = deque()
        self._in_loops: Counter[Phase] = Counter()

    def add(self, now: float, sample: Sample) -> None:
        """The board of the rank says this now."""
        if _progress(sample) != _progress(self.sample):
            self.moved_at = now
        self.sample = sample
        self._news()
        self._moments.append(_Moment(now, sample.loop, sample.step, sample.phase))
        if sample.in_loop:
            self._in_loops[sample.phase] += 1
        while self._moments[0].time < now - _LONG:
            self._moments.popleft()

    def forget(self) -> None:
        """What was is no measure of what comes: it stood still for a reason that is gone."""
        self._moments.clear()
        self._news()

    def _news(self) -> None:
        for name in ("_pace", "phase"):
            self.__dict__.pop(name, None)

    @property
    def rate(self) -> float | None:
        """Steps of the current loop in a second, lately; None if it is too early to say."""
        return self._pace[0] / self._pace[1] if self._pace is not None else None

    @property
    def rate_at_most(self) -> float | None:
        """The same if a step was missed by a moment: of ranks that are as fast, one may be seen to take one less."""
        return (self._pace[0] + 1) / self._pace[1] if self._pace is not None else None

    @cached_property  # until the next look
    def _pace(self) -> tuple[int, float] | None:
        """So many steps in so many seconds, lately; None if it is too early to say.

        Taken from a step to a step, if there were two: in a window of four seconds there are three steps of 1.2 seconds
        at times, and four at others, and a rate that jumps between the two would be wrong both times.
        """
        if not self._moments:
            return None
        newest = oldest = after = self._moments[-1]
        first = last = None
        for moment in reversed(self._moments):
            in_window = moment.time >= newest.time - _WINDOW
            if moment.loop != newest.loop or not (in_window or first is last):
                break
            if moment.step != after.step:
                first = after
                last = last or after
            if in_window:
                oldest = moment
            after = moment
        if first is not None and last is not None:
            steps, seconds = last.step - first.step, last.time - first.time
            if steps > 0 and seconds > _SHORT:
                # Who has taken longer than that for the next one has become slower.
                return steps, max(seconds, (newest.time - first.time) * steps / (steps + 1))
        seconds = newest.time - oldest.time
        return (newest.step - oldest.step, seconds) if seconds > _SHORT else None

    @cached_property
    def phase(self) -> Phase:
        """What it has mostly been doing for a moment."""
        if not self._moments:
            return Phase.NOTHING
        newest = self._moments[-1]
        if newest.phase in (Phase.ENDED, Phase.NOTHING):
            return newest.phase
        if self.sample.evaluates and newest.phase is Phase.FORWARD:
            return Phase.EVALUATING
        recent: Counter[Phase] = Counter()
        for moment in reversed(self._moments):
            if moment.time <= newest.time - _RECENT:
                break
            if moment.phase is not Phase.NOTHING:
                recent[moment.phase] += 1
        return recent.most_common(1)[0][0]

    @property
    def looks(self) -> int:
        """How often it was lately seen in the current loop."""
        return sum(moment.loop == self.sample.loop for moment in self._moments)

    def shares(self) -> dict[Phase, float]:
        """Which part of its time it has lately spent in each phase. Empty if it is too early to say.

        Its longest stay in one is left out: who was held up once is not slow.
        """
        stays: list[list[Any]] = []
        before = None
        for moment in self._moments:
            if moment.loop != self.sample.loop:
                continue
            if before is None or moment.step != before.step or moment.phase is not before.phase:
                stays.append([0, moment.phase])
            stays[-1][0] += 1
            before = moment
        if not stays:
            return {}
        stays.remove(max(stays, key=itemgetter(0)))
        number = sum(length for length, _ in stays)
        if number < _ENOUGH:
            return {}
        found: Counter[Phase] = Counter()
        for length, phase in stays:
            found[phase] += length
        return {phase: length / number for phase, length in found.items()}

    def own_share(self) -> float | None:
        """Which part of its time it has lately worked by itself, and not possibly waited for others."""
        return _own(self.shares())

    def own_share_of_all(self) -> float | None:
        """The same for all of its loops."""
        number = self._in_loops.total()
        return _own({phase: one / number for phase, one in self._in_loops.items()}) if number >= _ENOUGH else None


def _own(shares: Mapping[Phase, float]) -> float | None:
    return 1 - sum(shares.get(phase, 0.0) for phase in _WITH_OTHERS) if shares else None


def _progress(sample: Sample) -> tuple[object, ...]:
    return (
        sample.turn,
        sample.loop,
        sample.step,
        sample.phase,
        sample.collectives,
        tuple((bar.count, bar.ended) for bar in sample.bars),
    )
