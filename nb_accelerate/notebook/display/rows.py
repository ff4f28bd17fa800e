"""The rows of a panel: one for the ranks that are in step, and one for each that stands out."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

from nb_accelerate.base import words
from nb_accelerate.base.progress_page import Phase
from nb_accelerate.base.topology.rank_lists import ranges
from nb_accelerate.notebook.display.findings import stuck
from nb_accelerate.notebook.display.pace import compiling
from nb_accelerate.notebook.display.phase_times import in_words
from nb_accelerate.notebook.display.rank_history import METHODS, PHASES
from nb_accelerate.notebook.display.view import ENDED_BY_USER, Row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.notebook.display.findings.slow import Straggler
    from nb_accelerate.notebook.display.rank_history import RankHistory, Ranks
    from nb_accelerate.notebook.display.view import FailureSummary, Kind, PanelStatus

FEW = 2  # Ranks that have a row each. More that are alike are one row.

_MANY = 16  # ranks that are shown with what each does, at most
_SHORT = 8  # characters of the numbers of ranks for which their column has room
_SENDING = 1 << 20  # bytes on the way to its machine from which on a rank waits for them

# Part of a loss by which those of ranks in one row differ from which on it says the least and the greatest.
_SPREAD = 0.1


_OF_FIRST_BATCH = [PHASES[phase] for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.TRAINING)]


@dataclass(frozen=True)
class Rows:
    """Makes rows of what is known at one moment."""

    ranks: Ranks
    now: float
    state: PanelStatus  # of the whole run
    failure: FailureSummary | None
    stalled: set[int]  # ranks that have not moved for some time
    slow: Mapping[int, Straggler]
    rate: float | None  # mean steps per second of the run; None if there were none yet

    @property
    def has_ended(self) -> bool:
        return self.state not in ("starting", "running")

    @cached_property
    def kinds(self) -> dict[int, Kind]:
        """Whether ranks are late, have failed or are done, by rank."""
        return {number: self._kind(number) for number in self.ranks}

    @cached_property
    def steps(self) -> dict[int, tuple[str, float | None]]:
        """How far ranks are, by rank: the step, and the share from 0 to 1 if that is known."""
        return {number: self._step(number) for number in self.ranks}

    @cached_property
    def apart(self) -> float:
        """How many steps ranks that are in step may be apart: those of a second, since all are not read at once."""
        return max(2.0, self.rate or 0.0)

    @cached_property
    def machines(self) -> dict[int, str]:
        """The machines of ranks, by rank, if there are several."""
        machines = {number: rank.status.machine for number, rank in self.ranks.items()}
        return machines if len({*machines.values()}) > 1 else {}

    @cached_property
    def strays(self) -> set[int]:
        """Ranks that are not in step; none where most are not, since each goes at its own speed."""
        steps = {number: rank.sample.steps for number, rank in self.ranks.items()}
        middle = median(steps.values())
        strays = {number for number, step in steps.items() if abs(step - middle) > self.apart}
        return strays if 2 * len(strays) < len(steps) else set()

    @cached_property
    def doings(self) -> dict[int, str]:
        return {number: self._activity(number) for number in self.ranks}

    def each(self) -> tuple[Row, ...]:
        """Return a row for each rank, with what differs between ranks in step; of many without what they do."""
        is_said = len(self.ranks) <= _MANY
        return tuple(
            Row(
                ranks=str(number),
                machine=self.machines.get(number, ""),
                loss="" if rank.loss is None else words.measured(rank.loss),
                memory=words.size(rank.memory) if rank.memory else "",
                gpu=self._gpu([number]),
                now=self.doings[number] if is_said else "",
                location=self._location(rank) if is_said else "",
            )
            for number, rank in self.ranks.items()
        )

    def together(self) -> tuple[Row, ...]:
        """Return a row for the ranks that are in step, then those of others; more than `FEW` alike are one row too."""
        rows = self._groups() if len(self.ranks) > FEW else [(str(number), [number]) for number in self.ranks]
        return tuple(
            replace(self._row(members, label), times=in_words(self.seconds(self.ranks[number]) for number in members))
            for label, members in rows
        )

    def _groups(self) -> list[tuple[str, list[int]]]:
        """Return what each row calls its ranks, and these."""
        groups: dict[tuple[str, ...], list[int]] = {}  # by what sets them apart
        for number, kind in self.kinds.items():
            apart_by: tuple[str, ...] = (kind, self.ranks[number].status.state) if kind in ("late", "bad") else ()
            groups.setdefault((*apart_by, "stray") if number in self.strays else apart_by, []).append(number)
        rows = []
        for apart_by, group in sorted(groups.items()):
            each = [group] if len(group) > FEW or not apart_by else [[number] for number in group]
            rows += [(_label(members, is_rest=not apart_by and len(groups) > 1), members) for members in each]
        return rows

    def _kind(self, number: int) -> Kind:
        rank = self.ranks[number]
        state = rank.status.state
        # Of a failure only its ranks are marked, because it made the others stop or wait.
        if self.failure is not None and self.failure.ranks:
            return "bad" if number in self.failure.ranks else ""
        if state == "failed" and self.state not in ENDED_BY_USER:
            return "bad"
        if rank.loss is not None and not math.isfinite(rank.loss):
            return "bad"
        # A rank that has returned is late if others stand still and wait for it.
        if not self.has_ended and state == "returned" and any(stuck.waits(self.ranks[other]) for other in self.stalled):
            return "late"
        if self.has_ended or state == "returned":
            return "done" if self.state not in ("failed", *ENDED_BY_USER) else ""
        # A rank that goes on and waits in a collective is held up by others, and not late.
        if number in self.slow:
            return "late"
        return "late" if number in self.stalled and not stuck.waits(rank) else ""

    def _step(self, number: int) -> tuple[str, float | None]:
        rank = self.ranks[number]
        sample = rank.sample
        # A run that is done has no total any more: it may have ended before, as the program wanted.
        if self.state == "done" and sample.steps and (sample.ended_after is None or rank.whole is None):
            return words.count(rank.steps), 1.0
        if rank.whole is not None:
            return _of_total(*rank.whole)
        step, total = rank.in_epoch
        if sample.loop and total is not None:
            return _of_total(step, total)
        return words.count(step) if sample.loop else "", 1.0 if self.kinds[number] == "done" else None

    def seconds(self, rank: RankHistory) -> Mapping[Phase, float]:
        """Return where the time of a rank goes: lately, and of a run that has ended, from its first step on."""
        return rank.times.whole() if self.has_ended else rank.times.recent()

    def _row(self, members: Sequence[int], label: str) -> Row:
        """Return a row for ranks of the same kind; values of a single rank are taken from the median one."""
        ranks = [self.ranks[number] for number in members]
        ordered = sorted(members, key=lambda number: self.ranks[number].sample.steps)
        first, middle, last = ordered[0], ordered[len(ordered) // 2], ordered[-1]
        sample, rate = self.ranks[middle].sample, self.ranks[middle].rate
        if self.has_ended or (rate is None and middle not in self.stalled):
            rate = self.rate or rate
        step, share = self.steps[middle]
        if self.ranks[last].sample.steps - self.ranks[first].sample.steps > self.apart:
            step = f"{self.steps[first][0].partition(' / ')[0]} to {self.steps[last][0]}"
        memory = max(rank.memory for rank in ranks)
        now = Counter(self.doings[number] for number in members).most_common(1)[0][0]
        shown = next(number for number in members if self.doings[number] == now)
        kinds = {self.kinds[number] for number in members}
        return Row(
            ranks=label,
            machine=", ".join(dict.fromkeys(self.machines[number] for number in members if self.machines)),
            kind=kinds.pop() if len(kinds) == 1 else "",
            share=share,
            step=step,
            epoch=f"{sample.epoch} of {sample.epochs}" if sample.epochs else str(sample.epoch or ""),
            rate="" if not sample.loop else "-" if rate is None else words.rate(rate),
            loss=_losses([rank.loss for rank in ranks if rank.loss is not None]),
            memory=words.size(memory) if memory else "",
            gpu=self._gpu(members),
            now=now,
            location=self._location(self.ranks[shown]),
        )

    def _location(self, rank: RankHistory) -> str:
        is_on = rank.status.state == "running" and not self.has_ended
        return rank.location if is_on else ""

    def _gpu(self, members: Sequence[int]) -> str:
        """Return the median utilisation at the last steps; "" if none is known, "-" if no rank takes steps now."""
        measured = [rank for number in members if (rank := self.ranks[number]).sample.utilisation is not None]
        if self.has_ended or not measured:
            return ""
        values = [
            rank.sample.utilisation or 0
            for rank in measured
            if rank.status.state == "running" and not rank.sample.evaluates and self.now - rank.moved_at <= stuck.STALL
        ]
        return words.percent(median(values)) if values else "-"

    def _activity(self, number: int) -> str:
        rank = self.ranks[number]
        status, sample = rank.status, rank.sample
        kind = self.kinds[number]
        if status.state == "starting":
            return "importing torch"
        unsent, total = status.sending
        if unsent >= _SENDING and not self.has_ended:
            return f"{words.size(total - unsent)} of {words.size(total)} sent to {status.machine}"
        failed_with = self.failure.what if self.failure is not None else ""
        if self.failure is not None and number in self.failure.ranks and failed_with:
            return failed_with
        if status.state == "returned":
            early = kind == "late" and self.steps[number][0]
            return f"returned at step {words.count(rank.step)}" if early else "done"

        # The run has ended, or this rank has.
        if self.state == "done" or (self.state in ENDED_BY_USER and self.failure is None):
            return self.state
        if kind == "bad" and (status.state in ("failed", "ended") or self.has_ended):
            return failed_with or "failed"
        if self.has_ended:
            waited = f" in {METHODS[sample.waits_in]}" if sample.waits_in is not None else ""
            return self.state if self.state in ENDED_BY_USER else f"stopped{waited}"

        # It goes on.
        doing = compiling([rank], self.now) or rank.doing
        is_first = sample.in_loop and sample.step <= 1 and not sample.steps_before
        if is_first and doing in _OF_FIRST_BATCH:
            doing = f"first batch: {doing}"
        if number in self.stalled:
            collective = stuck.collective(rank)
            return f"waits in {collective}" if collective else doing
        return f"{doing}, saving" if sample.saves and sample.phase is not Phase.SAVING else doing


def _of_total(done: int, total: int) -> tuple[str, float]:
    return f"{words.count(done)} / {words.count(total)}", min(1.0, done / total) if total else 1.0


def _label(members: Sequence[int], *, is_rest: bool) -> str:
    """Return the numbers of ranks, or of so many that these do not fit how many they are."""
    label = ranges(members, shortest=2)
    return label if len(label) <= _SHORT else "rest" if is_rest else words.plural(len(members), "rank")


def _losses(losses: Sequence[float]) -> str:
    """Return the mean of losses, or where they differ the least and the greatest; one that is not finite of all."""
    wrong = [loss for loss in losses if not math.isfinite(loss)]
    if wrong or not losses:
        return words.measured(wrong[0]) if wrong else ""
    least, greatest = min(losses), max(losses)
    if greatest - least > _SPREAD * max(abs(least), abs(greatest)):
        return f"{words.measured(least)} to {words.measured(greatest)}"
    return words.measured(sum(losses) / len(losses))
