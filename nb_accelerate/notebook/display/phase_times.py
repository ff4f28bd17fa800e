"""Where the time of each rank goes: over its recent past while it runs, over all its steps when it has ended."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import Phase
from nb_accelerate.base.progress_page.phase_times import WORK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nb_accelerate.base.progress_page import Sample

_WINDOW = 10.0
"""Seconds of a run that are summed up while it is on."""

_KEEP_EVERY = 0.5
"""Seconds between two samples that are kept."""

_NAMES = {
    Phase.DATA: "loading data",
    Phase.TRAINING: "forward and backward",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.WAITING: "waiting",
    Phase.STEP: "optimizer",
    Phase.EVALUATING: "evaluation",
    Phase.SAVING: "saving",
    Phase.RUNNING: "between steps",
}


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What a rank spent its time on, from its first step to its last."""

    seconds: Mapping[Phase, float]
    steps: int
    exchanging: float = 0.0  # seconds of those in `Phase.WAITING`: for the exchange of gradients
    num_workers: int | None = None  # of the loader that it trained with; None if not known
    times_waits: bool = False  # the wait for that exchange is in `Phase.WAITING`
    utilisation: float | None = None  # mean percent of the time in which its device computed; None if not known


class PhaseTimes:
    """Collects the times of one rank, without those before its first step, which waits for much that comes once."""

    def __init__(self) -> None:
        self._first: Sample | None = None
        self._last: Sample | None = None
        self._recent: deque[tuple[float, Mapping[Phase, float]]] = deque()
        self._of_recent: Mapping[Phase, float] | None = None
        self._num_workers: int | None = None
        self._utilisation = (0, 0)

    def add(self, now: float, sample: Sample) -> None:
        """Add a sample that was taken at the time `now`."""
        if not sample.steps:
            return
        if self._first is None:
            self._first = self._last = sample
        assert self._last is not None
        if sample.steps > self._last.steps:
            self._last = sample
            if sample.utilisation is not None:
                total, number = self._utilisation
                self._utilisation = total + sample.utilisation, number + 1
        if sample.trains and sample.num_workers is not None:
            self._num_workers = sample.num_workers
        if not self._recent or now >= self._recent[-1][0] + _KEEP_EVERY:
            self._of_recent = None
            self._recent.append((now, sample.seconds))
            while self._recent[0][0] < now - _WINDOW:
                self._recent.popleft()

    def recent(self) -> Mapping[Phase, float]:
        """Return the seconds of its recent past by phase; none if it is too early to say."""
        if self._of_recent is None:
            self._of_recent = _difference(self._recent[-1][1], self._recent[0][1]) if len(self._recent) > 1 else {}
        return self._of_recent

    def whole(self) -> RankTimes | None:
        """Return what all its steps but the first took; None if there are none."""
        if self._first is None or self._last is None or self._last.steps <= self._first.steps:
            return None
        total, number = self._utilisation
        return RankTimes(
            seconds=_difference(self._last.seconds, self._first.seconds),
            steps=self._last.steps - self._first.steps,
            exchanging=max(0.0, self._last.exchanging - self._first.exchanging),
            num_workers=self._num_workers,
            times_waits=self._last.times_waits,
            utilisation=total / number if number else None,
        )


def in_words(times: Iterable[Mapping[Phase, float]]) -> str:
    """Return where the time of ranks went together: ``loading data 3 %, forward 30 %``. Less than 1 % is left out."""
    spent = dict.fromkeys(WORK, 0.0)
    for seconds in times:
        for phase in seconds:
            spent[phase] += seconds[phase]
    least = 0.01 * sum(spent.values())
    return ", ".join(f"{_NAMES[phase]} {spent[phase] / least:.0f} %" for phase in WORK if spent[phase] >= least > 0)


def _difference(after: Mapping[Phase, float], before: Mapping[Phase, float]) -> dict[Phase, float]:
    return {phase: spent for phase in WORK if (spent := after.get(phase, 0.0) - before.get(phase, 0.0)) > 0}
