"""The panel of a sweep: a row for each run, with its configuration in the place of a rank."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.base import words
from nb_accelerate.notebook.display.rank_history import RankStatus
from nb_accelerate.notebook.display.state import PanelState
from nb_accelerate.notebook.display.view import Row, View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.rank_history import RankHistory
    from nb_accelerate.notebook.display.view import Facts, Kind, PanelStatus

_MOST_ROWS = 24
"""Runs that have a row; of more, those that are on or have failed, and then those with the lowest losses."""

_ON = ("starting", "running")

_COUNTED: tuple[PanelStatus, ...] = ("running", "done", "failed", "interrupted", "stopped")


@dataclass(frozen=True, kw_only=True)
class RunStatus(RankStatus):
    """What is seen of a run at one moment; its rank is its index."""

    outcome: PanelStatus = "running"
    failure: str = ""  # why it failed, in a line


class RunsState(PanelState):
    """Collects what is known about the runs of a sweep, as `PanelState` does about ranks that work together."""

    def __init__(self, facts: Facts, ranks: Sequence[int], now: float) -> None:
        super().__init__(facts, ranks, now)
        self._began_at: dict[int, float] = {}
        self._ended_at: dict[int, float] = {}
        self._status: dict[int, RunStatus] = {}

    @override
    def observe(self, now: float, seen: Sequence[RankStatus]) -> None:
        for status in seen:
            assert isinstance(status, RunStatus)
            if status.rank in self._ended_at:
                continue
            self._began_at.setdefault(status.rank, now)
            self._status[status.rank] = status
            self.ranks[status.rank].add(now, status)
            if status.outcome not in _ON:
                self._ended_at[status.rank] = now
        if seen and self._state == "starting":
            self._state = "running"

    @override
    def stalled(self, now: float) -> set[int]:
        return set()

    @property
    @override
    def has_content(self) -> bool:
        return True

    @override
    def view(self, now: float) -> View:
        now = self._ended if self._ended is not None else now
        counted = Counter(status.outcome for status in self._status.values())
        waiting = len(self.ranks) - len(self._status)
        counts = [f"{counted[outcome]} {outcome}" for outcome in _COUNTED if counted[outcome]]
        counts += [f"{waiting} {'waiting' if self._ended is None else 'not started'}"] if waiting else []
        chosen = self._chosen()
        counts += [f"{len(self._status) - len(chosen)} not shown"] if len(chosen) < len(self._status) else []
        return View(
            state=self._state,
            facts=self._facts,
            elapsed=words.duration(now - self._began),
            outlook=tuple(counts),
            summary=tuple(counts),
            rows=tuple(self._row(index, now) for index in chosen),
            columns=("step", "loss", "lasted"),
        )

    def _chosen(self) -> list[int]:
        """Return the runs that have a row, in their order."""

        def order(index: int) -> tuple[bool, float]:
            loss = self.ranks[index].loss
            is_finite = loss is not None and math.isfinite(loss)
            return self._status[index].outcome == "done", loss if loss is not None and is_finite else math.inf

        return sorted(sorted(self._status, key=order)[:_MOST_ROWS])

    def _row(self, index: int, now: float) -> Row:
        run, status = self.ranks[index], self._status[index]
        step, share = _step(run, status.outcome)
        return Row(
            ranks=self._facts.runs[index],
            kind=_kind(run, status.outcome),
            share=share,
            step=step,
            loss="" if run.loss is None else words.measured(run.loss),
            lasted=words.duration(self._ended_at.get(index, now) - self._began_at[index]),
            now=status.failure or _doing(run, status),
        )


def _kind(run: RankHistory, outcome: PanelStatus) -> Kind:
    if outcome == "failed" or (run.loss is not None and not math.isfinite(run.loss)):
        return "bad"
    return "done" if outcome == "done" else ""


def _doing(run: RankHistory, status: RunStatus) -> str:
    if status.outcome not in _ON:
        return status.outcome
    if status.state in ("starting", "stopped"):
        return status.state
    sample = run.sample
    if run.whole is None and sample.epoch > 1:  # the bar is then of this epoch alone
        return f"epoch {sample.epoch}"
    return "running"


def _step(run: RankHistory, outcome: PanelStatus) -> tuple[str, float | None]:
    """Return how far a run is, and the share from 0 to 1 if that is known."""
    sample = run.sample
    if outcome == "done":  # it may have ended before the last step, as the program wanted
        return words.count(sample.steps) if sample.steps else "", 1.0
    step, total = run.whole or (sample.step, sample.total or 0)
    if not sample.loop:
        return "", None
    if not total:
        return words.count(step), None
    return f"{words.count(step)} / {words.count(total)}", min(1.0, step / total)
