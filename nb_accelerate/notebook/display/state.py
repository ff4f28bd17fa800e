"""The state of a panel: takes samples of the ranks, gives a `View`. Uses no process, no kernel and no clock."""

from __future__ import annotations

import re
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Any

from nb_accelerate.base import words
from nb_accelerate.base.progress_page import Phase
from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.notebook.display.findings.advice import Advice
from nb_accelerate.notebook.display.findings.finding import NotFinite, RankWarnings
from nb_accelerate.notebook.display.findings.slow import Slow
from nb_accelerate.notebook.display.findings.stuck import Stuck, stalled_ranks
from nb_accelerate.notebook.display.logged_values import LoggedValues, ThinnedCurve
from nb_accelerate.notebook.display.memory import sharded_line
from nb_accelerate.notebook.display.pace import Pace, outlook, summary
from nb_accelerate.notebook.display.phase_times import awaited, in_words
from nb_accelerate.notebook.display.rank_history import RankHistory, mean_loss
from nb_accelerate.notebook.display.rows import FEW, Rows
from nb_accelerate.notebook.display.view import FIGURES, BarLine, View

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.base.progress_page import Bar, Sample
    from nb_accelerate.notebook.display.findings.finding import Finding
    from nb_accelerate.notebook.display.rank_history import RankObservation, Ranks
    from nb_accelerate.notebook.display.view import Facts, FailureSummary, PanelStatus, Row


_NUMBER = re.compile(r"\d+")

_TIME_LEFT = re.compile(r"(\[[\d:]+)<[\d:?]+")  # As tqdm writes it: ``[00:05<00:10, ...]``.
_ALIKE = 0.02  # largest difference of counts of ranks that is not told, as a part of the total
_MOST = 12  # lines, at most: of 64 ranks that have a bar each, most are left out


def bar_lines(samples: Mapping[int, Sample], *, has_ended: bool) -> tuple[BarLine, ...]:
    """Return lines for the progress bars of ranks, outermost bars first.

    Args:
        has_ended: the run has, and so have bars that it did not close.
    """
    bars_by_label: dict[tuple[str, int], dict[int, Bar]] = {}
    for rank, sample in samples.items():
        num_seen: Counter[str] = Counter()
        for bar in sample.bars:
            label = _NUMBER.sub("#", bar.label)
            bars_by_label.setdefault((label, num_seen[label]), {})[rank] = bar
            num_seen[label] += 1
    groups: list[dict[int, Bar]] = []
    for bars in bars_by_label.values():
        groups += [{rank: bar} for rank, bar in bars.items()] if _name_ranks(bars) else [bars]
    groups.sort(key=lambda bars: min(bar.level for bar in bars.values()))
    levels = sorted({bar.level for bars in groups for bar in bars.values()})
    lines = [_line(bars, levels, has_ended=has_ended, is_main=min(samples) in bars) for bars in groups[:_MOST]]
    if len(groups) > _MOST:
        lines.append(BarLine(label="", text=f"and {len(groups) - _MOST} more bars"))
    return tuple(lines)


def _name_ranks(bars: Mapping[int, Bar]) -> bool:
    """Return whether labels, which differ in numbers only, have the rank's number in one place."""
    numbers_in_labels = [_NUMBER.findall(bar.label) for bar in bars.values()]
    columns = zip(*numbers_in_labels, strict=True)
    return len(bars) > 1 and tuple(map(str, bars)) in columns


def _line(bars: Mapping[int, Bar], levels: Sequence[int], *, has_ended: bool, is_main: bool) -> BarLine:
    """Return the line of a bar, from the first rank that has the bar."""
    first = min(bars)
    bar = bars[first]
    counts = [bar_of_rank.count for bar_of_rank in bars.values()]
    text = bar.text
    has_ended = has_ended or all(bar_of_rank.ended for bar_of_rank in bars.values())
    is_full = bar.total is None or bar.count >= bar.total
    if has_ended:
        text = _TIME_LEFT.sub(r"\1", text) + ("" if is_full else ", ended early")
    if max(counts) - min(counts) > max(_ALIKE * (bar.total or max(counts)), 1.0):
        text += f" (ranks: {words.count(min(counts))} to {words.count(max(counts))})"
    return BarLine(
        label=bar.label if is_main or bar.label else named(list(bars)),
        text=text,
        share=min(1.0, bar.count / bar.total) if bar.total else None,
        kind="" if not has_ended else "done" if is_full else "ended",
        depth=levels.index(bar.level),
    )


_FIRST_COLUMNS = ("step", "epoch", "rate", "loss", "memory")  # columns that are there from the first drawing on


class PanelState:
    """Collects what is known about the ranks of a launch or a cell. Call `observe` now and then, and `end` once.

    Attributes:
        stuck: tells of ranks that do not move. Others may know more about them.
    """

    def __init__(self, facts: Facts, ranks: Sequence[int], now: float) -> None:
        self._facts = facts
        self._began = now
        self._ended: float | None = None
        self._state: PanelStatus = "starting"
        self._failure: FailureSummary | None = None
        self.ranks: Ranks = {rank: RankHistory(rank, now) for rank in ranks}
        self.stuck, self._slow = Stuck(), Slow()
        self._findings: tuple[Finding, ...] = (self.stuck, self._slow, RankWarnings(), NotFinite(), Advice(facts.cores))
        self._losses = ThinnedCurve()
        self._logged = LoggedValues()
        self._pace = Pace()
        self._columns = {*_FIRST_COLUMNS}
        self._peak = 0
        self._rows_per_batch = 0
        self._settings = dict(facts.settings)

    def observe(self, now: float, observations: Sequence[RankObservation]) -> None:
        for status in observations:
            self.ranks[status.rank].add(now, status)
            if status.sample.trains:
                self._rows_per_batch = status.sample.rows
                self._settings |= _settings(status.sample)
            self._peak = max(self._peak, status.sample.peak or status.memory)
        if self._state == "starting" and any(status.state != "starting" for status in observations):
            self._state = "running"
        for finding in self._findings:
            finding.observe(self.ranks, now)
        steps = int(median(rank.sample.steps for rank in self.ranks.values()))
        self._pace.add(now, steps)
        loss = mean_loss(self.ranks)
        if loss is not None:
            self._losses.add(*loss)
        first = self.ranks[min(self.ranks)]
        self._logged.add(first.sample, first.step)

    def stalled(self, now: float) -> set[int]:
        """Return the ranks that have not moved for some time, and should have."""
        return stalled_ranks(self.ranks, now)

    def end(self, now: float, state: PanelStatus, failure: FailureSummary | None = None) -> None:
        self._ended, self._state, self._failure = now, state, failure

    @property
    def has_content(self) -> bool:
        """Return whether a rank has told more than that it runs: a loop, a bar, a value, a warning."""
        samples = [rank.sample for rank in self.ranks.values()]
        return any(
            sample.loop or sample.bars or sample.scalars or sample.loss is not None or sample.compiled or sample.warning
            for sample in samples
        )

    def view(self, now: float) -> View:
        has_ended = self._ended is not None
        now = self._ended if self._ended is not None else now
        ranks = self.ranks
        rows_now = Rows(
            ranks,
            now,
            self._state,
            self._failure,
            set() if has_ended else self.stalled(now),
            {} if has_ended else self._slow.stragglers,
            self._pace.rate,
        )
        has_steps = any(step for step, _ in rows_now.steps.values())
        bars = bar_lines({number: rank.sample for number, rank in ranks.items()}, has_ended=has_ended)
        rows: tuple[Row, ...] = ()
        if not bars or has_steps or {"late", "bad"} & {*rows_now.kinds.values()}:  # else the bars say it all
            rows = rows_now.together()
        if self._state == "failed" and not has_steps and (failure := self._failure) is not None:
            # All have failed with the error that is raised: rows would only repeat its traceback.
            is_told = bool(failure.what) and not failure.details and {*failure.ranks} == {*rows_now.ranks}
            rows = () if is_told else rows
        self._columns.update(name for row in rows for name, _ in FIGURES if getattr(row, name))
        return View(
            state=self._state,
            facts=self._facts,
            elapsed=words.duration(now - self._began),
            outlook=() if has_ended else outlook(ranks, self._pace, now),
            summary=summary(ranks, self._pace.rate, self._rows_per_batch) if has_ended else (),
            peak=words.size(self._peak) if has_ended and self._peak else "",
            bars=bars,
            rows=rows,
            each=rows_now.each() if rows and len(ranks) > FEW else (),
            columns=tuple(name for name, _ in FIGURES if name in self._columns) if has_steps or not has_ended else (),
            curve=self._losses.points,
            settings=dict(self._settings),
            held=sharded_line({number: rank.sample.held for number, rank in ranks.items()}),
            logged=self._logged.curves,
            warnings=self._sentences(now, is_advice=False),
            times=self._times({number: rows_now.seconds(rank) for number, rank in ranks.items()}),
            advice=" ".join(self._sentences(now, is_advice=True)) if self._state != "failed" else "",
            failure=self._failure,
        )

    def _times(self, times: Mapping[int, Mapping[Phase, float]]) -> str:
        """Return where the time of ranks goes, and whose that is; at the end the advice names code of the user."""
        late = awaited(times)
        whose = {Phase.WAITING: f"for {named(late) if late else 'each other'}"} if len(times) > 1 else {}
        if self._ended is None:
            slowest = max(times, key=lambda number: times[number].get(Phase.RUNNING, 0.0))
            line = self.ranks[slowest].line_between_steps
            whose[Phase.RUNNING] = f"your own code{line and ', mostly '}{line}"
        return in_words(times.values(), whose)

    def _sentences(self, now: float, *, is_advice: bool) -> tuple[str, ...]:
        return tuple(
            sentence
            for finding in self._findings
            if finding.is_advice is is_advice
            if (finding.while_on if self._ended is None else finding.at_end)
            for sentence in finding.sentences(self.ranks, now)
        )


def _settings(sample: Sample) -> dict[str, Any]:
    # Batches of a loop over all epochs are those of an optimizer's step.
    batch = sample.rows * (1 if sample.spans_epochs else max(1, sample.accumulation))
    start = "resumed" if sample.resumed else ""
    found = {"effective batch": batch, "mixed_precision": sample.precision, "start": start}
    return {name: value for name, value in found.items() if value}
