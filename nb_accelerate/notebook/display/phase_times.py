"""Where the time of each rank goes: over its recent past while it runs, over all its steps when it has ended."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import Phase
from nb_accelerate.base.progress_page.phase_times import WORK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nb_accelerate.base.progress_page import Sample

_WINDOW = 10.0  # seconds of a run that are summed up while it is on
_KEEP_EVERY = 0.5  # seconds between two samples that are kept
_MUCH = 0.2  # part of the time from which on it is said whose it is

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


class PhaseTimes:
    """Collects the times of one rank, without those before its first step, which waits for much that comes once."""

    def __init__(self) -> None:
        self._first: Sample | None = None
        self._last: Sample | None = None
        self._recent: deque[tuple[float, Mapping[Phase, float]]] = deque()
        self._of_recent: Mapping[Phase, float] | None = None
        self.num_workers: int | None = None  # of the loader that it trained with; None if not known.

    def add(self, now: float, sample: Sample) -> None:
        if not sample.steps:
            return
        if self._first is None:
            self._first = self._last = sample
        assert self._last is not None
        if sample.steps > self._last.steps:
            self._last = sample
        if sample.trains and sample.num_workers is not None:
            self.num_workers = sample.num_workers
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

    @property
    def steps(self) -> int:
        """Return the number of its steps but the first."""
        return self._last.steps - self._first.steps if self._first is not None and self._last is not None else 0

    def whole(self) -> Mapping[Phase, float]:
        """Return the seconds of all its steps but the first by phase; none if there are none."""
        if self._first is None or self._last is None or not self.steps:
            return {}
        return _difference(self._last.seconds, self._first.seconds)


def awaited(times: Mapping[int, Mapping[Phase, float]]) -> list[int]:
    """Return the ranks that others wait for, by the times of all: those that wait less than half as long as another.

    If most do, or none, ranks wait for each other, and the list is empty.
    """
    waits = {rank: seconds.get(Phase.WAITING, 0.0) for rank, seconds in times.items()}
    late = [rank for rank, waited in waits.items() if waited < max(waits.values()) / 2]
    return late if 2 * len(late) <= len(waits) else []


def in_words(times: Iterable[Mapping[Phase, float]], whose: Mapping[Phase, str] | None = None) -> str:
    """Return where the time of ranks went together: ``loading data 3 %, forward 30 %``. Less than 1 % is left out."""
    spent = dict.fromkeys(WORK, 0.0)
    for seconds in times:
        for phase in seconds:
            spent[phase] += seconds[phase]
    least = 0.01 * sum(spent.values())
    parts = {phase: f"{_NAMES[phase]} {spent[phase] / least:.0f} %" for phase in WORK if spent[phase] >= least > 0}
    much = {phase: text for phase, text in (whose or {}).items() if text and spent[phase] >= _MUCH * 100 * least}
    return ", ".join(f"{text} ({much[phase]})" if phase in much else text for phase, text in parts.items())


def _difference(after: Mapping[Phase, float], before: Mapping[Phase, float]) -> dict[Phase, float]:
    return {phase: spent for phase in WORK if (spent := after.get(phase, 0.0) - before.get(phase, 0.0)) > 0}
