"""The state of a panel: takes samples of the ranks, gives a `View`. Uses no process, no kernel and no clock.

Longer than 400 lines, because every part of the view reads the same samples.
"""

from __future__ import annotations

import math
from collections import Counter
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple

from nb_accelerate.base.progress_page import Phase
from nb_accelerate.base.topology.rank_lists import ranges
from nb_accelerate.notebook.display import words
from nb_accelerate.notebook.display.bars import bar_rows
from nb_accelerate.notebook.display.compiling import compiling, warnings_of
from nb_accelerate.notebook.display.findings.advice import advice
from nb_accelerate.notebook.display.findings.loss_jump import LossJump
from nb_accelerate.notebook.display.findings.not_finite import NotFiniteLosses
from nb_accelerate.notebook.display.findings.standstill import Standstill
from nb_accelerate.notebook.display.findings.stragglers import slow_sentences, stragglers
from nb_accelerate.notebook.display.logged_values import LoggedValues
from nb_accelerate.notebook.display.memory import memory_table, parts_of, sharded_line
from nb_accelerate.notebook.display.pace import Pace, outlook, remarks, summary
from nb_accelerate.notebook.display.phase_times import PhaseTimes, in_words
from nb_accelerate.notebook.display.seen import Seen
from nb_accelerate.notebook.display.track import METHODS, LossHistory, Track, loss_of
from nb_accelerate.notebook.display.usage import of_cpu, of_gpu
from nb_accelerate.notebook.display.view import ENDED_BY_USER, FIGURES, Dot, Row, View

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.notebook.display.findings.stragglers import Straggler
    from nb_accelerate.notebook.display.view import Facts, FailureSummary, Kind, PanelStatus

STALL = 5.0
"""Seconds without a change after which a rank that had been moving counts as stalled."""

MOST_ROWS = 12
"""Ranks with a row each; more are folded into one, with those that stand out."""

_FIRST_COLUMNS = ("step", "epoch", "rate", "loss", "memory")
"""Columns that are there from the first drawing on."""

_OUTLIERS = 6
"""Ranks that stand out and keep a row of their own where there are more than `MOST_ROWS`, at most."""

_COMPARE_EVERY = 1.0
"""Seconds between two searches for stragglers."""


class _Standing(NamedTuple):
    """How far a rank is, and whether it stands out."""

    kind: Kind
    step: str
    share: float | None
    slow: Straggler | None
    is_stalled: bool


class PanelState:
    """Collects what is known about the ranks of a launch or a cell. Call `observe` now and then, and `end` once.

    Args:
        facts: what does not change.
        now: `time.monotonic` at the beginning.
    """

    def __init__(self, facts: Facts, ranks: Sequence[int], now: float) -> None:
        self._facts = facts
        self._began = now
        self._ended: float | None = None
        self._state: PanelStatus = "starting"
        self._failure: FailureSummary | None = None
        self._tracks = {rank: Track(now) for rank in ranks}
        self._times = {rank: PhaseTimes() for rank in ranks}
        self._seen = {rank: Seen(rank=rank, state="starting") for rank in ranks}
        self._losses = LossHistory()
        self._logged = LoggedValues()
        self._not_finite = NotFiniteLosses()
        self._jump = LossJump()
        self._columns = {*_FIRST_COLUMNS}
        self._peak = 0
        self._rows_per_batch = 0
        self._stood_still = False
        self._slow: Mapping[int, Straggler] = {}
        self._compare_at = now
        self._stacks: Mapping[int, str] = {}
        self._hang = self._hang_outcome = ""
        self._is_left = False
        self._pace = Pace()

    def observe(self, now: float, seen: Sequence[Seen]) -> None:
        """Take a sample of each rank, made at the time `now`."""
        for one in seen:
            track = self._tracks[one.rank]
            before = track.moved_at
            track.add(now, one.sample)
            if track.moved_at != before:
                self._hang, self._hang_outcome, self._is_left = "", "", False
            self._times[one.rank].add(now, one.sample)
            if track.moved_at != before and one.rank in self._stacks:
                self._stacks = {rank: stack for rank, stack in self._stacks.items() if rank != one.rank}
            self._seen[one.rank] = one
            self._not_finite.add(one.rank, one.sample)
            if one.sample.trains:
                self._rows_per_batch = one.sample.rows
            self._peak = max(self._peak, one.sample.peak or one.memory)
        if self._state == "starting" and any(one.state != "starting" for one in seen):
            self._state = "running"
        self._forget_standstill(now)
        self._compare(now)
        steps = int(median(track.sample.steps for track in self._tracks.values()))
        self._pace.add(now, steps, is_paused=self._is_paused)
        sampled = self._sampled()
        self._losses.add(sampled)
        self._logged.add(self._tracks[min(self._tracks)].sample)
        self._jump.add(sampled)

    def stalled(self, now: float) -> list[int]:
        """Return the ranks that were making progress and have made none for `STALL` seconds.

        Also those that have not begun to, while others wait for them.
        """
        stalled = [rank for rank, track in self._tracks.items() if self._is_stalled(rank, track, now)]
        if any(self._tracks[rank].sample.phase is Phase.WAITING for rank in stalled):
            awaited = (rank for rank, seen in self._seen.items() if seen.state == "running" and rank not in stalled)
            stalled += [rank for rank in awaited if now - self._tracks[rank].moved_at > STALL]
        return sorted(stalled)

    def explain(self, stacks: Mapping[int, str]) -> None:
        """Take dumps of the ranks' stacks, by rank, to say where the stalled ones are."""
        self._stacks = {rank: dump for rank, dump in stacks.items() if dump}

    def tell_hang(self, text: str, outcome: str = "") -> None:
        """Take what is known of ranks that wait for others; it is shown until one of them moves.

        Args:
            text: a sentence, for where the samples of the ranks show no standstill.
            outcome: another one about how it will end; may be empty.
        """
        self._hang = words.capitalized(text)
        self._hang_outcome = outcome

    def leave_standstill(self, now: float) -> bool:
        """Leave out the sentence about ranks that stand still until one of them moves: the caller says it.

        Returns:
            True if it was said already, so that nobody else has to.
        """
        is_said = bool(self._standstill.sentences(set(self.stalled(now)), now))
        self._is_left = not is_said
        return is_said

    def end(self, now: float, state: PanelStatus, failure: FailureSummary | None = None) -> None:
        """Note how the launch or cell ended, and why if it failed."""
        self._ended, self._state, self._failure = now, state, failure

    @property
    def has_content(self) -> bool:
        """Return whether a rank has told more than that it runs: a loop, a bar, a value, a warning."""
        samples = (track.sample for track in self._tracks.values())
        return any(
            one.loop or one.bars or one.scalars or one.loss is not None or one.compiled or one.warning
            for one in samples
        )

    def view(self, now: float) -> View:
        """Return the panel as it is at the time `now`."""
        now = self._ended if self._ended is not None else now
        stalled = set(self.stalled(now)) if self._ended is None else set()
        slow = self._slow if self._ended is None and not self._stood_still else {}
        known = {rank: self._standing(rank, slow.get(rank), stalled) for rank in self._tracks}
        bars = bar_rows({rank: track.sample for rank, track in self._tracks.items()})
        if bars and not any(one.step or one.kind in ("late", "bad") for one in known.values()):
            known = {}  # the bars say it all
        many = len(known) > MOST_ROWS
        rows = self._folded(known, now) if many else tuple(self._row(rank, one, now) for rank, one in known.items())
        self._columns.update(name for row in rows for name, _ in FIGURES if getattr(row, name))
        is_known = self._ended is None or any(one.step for one in known.values())
        return View(
            state=self._state,
            facts=self._facts,
            is_paused=self._is_paused,
            elapsed=words.duration(now - self._began),
            outlook=outlook(self._tracks, self._pace, now, stall=STALL) if self._ended is None else (),
            summary=summary(self._tracks, self._pace.rate, self._rows_per_batch) if self._ended is not None else (),
            remarks=remarks(self._tracks, self._peak) if self._ended is not None else (),
            bars=bars,
            rows=rows,
            columns=self._shown_columns() if is_known else (),
            dots=tuple(Dot(rank=rank, share=one.share or 0.0, kind=one.kind) for rank, one in known.items())
            if many
            else (),
            curve=self._losses.points,
            gaps=self._not_finite.gaps,
            held=sharded_line({rank: track.sample.held for rank, track in self._tracks.items()}),
            memory=memory_table({rank: (self._memory(rank), one.sample.held) for rank, one in self._tracks.items()}),
            logged=self._logged.curves,
            warnings=self._warnings(stalled, slow_sentences(slow, len(self._tracks)), now),
            times=in_words(self._seconds(rank) for rank in self._times),
            advice=self._advice(),
            failure=self._failure,
        )

    @property
    def _is_paused(self) -> bool:
        return self._ended is None and all(track.sample.paused for track in self._tracks.values())

    # Rows.

    def _kind(self, rank: int, stalled: bool, slow: Straggler | None, is_waited_for: bool) -> Kind:
        state = self._seen[rank].state
        loss = loss_of(self._tracks[rank].sample)
        if self._failure is not None and self._failure.ranks:
            return "bad" if rank in self._failure.ranks else ""
        if state == "failed" and self._state not in ENDED_BY_USER:
            return "bad"
        if loss is not None and not math.isfinite(loss):
            return "bad"
        if self._ended is None and is_waited_for:
            return "late"
        if self._ended is not None or state == "returned":
            return "done" if self._state not in ("failed", *ENDED_BY_USER) else ""
        if state == "stopped" or slow is not None:
            return "late"
        return "late" if stalled and not self._standstill.waits(rank) else ""

    def _standing(self, rank: int, slow: Straggler | None, stalled: set[int]) -> _Standing:
        share: float | None
        track = self._tracks[rank]
        sample = track.sample
        is_stalled, is_waited_for = rank in stalled, self._standstill.is_waited_for(rank, stalled)
        kind = self._kind(rank, is_stalled, slow, is_waited_for)
        if self._state == "done" and sample.steps and (sample.ended_after is None or track.whole is None):
            step = words.count(sample.steps)
            share = 1.0
        elif track.whole is not None:
            step, share = f"{words.count(track.whole[0])} / {words.count(track.whole[1])}", _part(*track.whole)
        elif sample.loop == 0:
            step, share = "", 1.0 if kind == "done" else None
        elif sample.total is None:
            step, share = words.count(sample.step), 1.0 if kind == "done" else None
        else:
            step = f"{words.count(sample.step)} / {words.count(sample.total)}"
            share = _part(sample.step, sample.total)
        return _Standing(kind, step, share, slow, is_stalled)

    def _row(self, rank: int, standing: _Standing, now: float) -> Row:
        track, seen = self._tracks[rank], self._seen[rank]
        sample = track.sample
        loss = loss_of(sample)
        rate = track.rate
        runs = seen.state == "running" and self._ended is None and not sample.paused
        place = self._standstill.place(rank) if standing.is_stalled else ""
        if self._pace.has_steps and (self._ended is not None or (rate is None and not standing.is_stalled)):
            rate = self._pace.rate
        memory = self._memory(rank)
        return Row(
            ranks=str(rank),
            kind=standing.kind,
            share=standing.share,
            step=standing.step,
            epoch=f"{sample.epoch} / {sample.epochs}" if sample.epochs else str(sample.epoch or ""),
            rate="" if not sample.loop else "-" if rate is None else words.rate(rate),
            loss="" if loss is None else words.measured(loss),
            memory=words.size(memory) if memory else "",
            held=parts_of(sample.held),
            gpu=self._gpu([rank], now),
            cpu=self._cpu([rank]),
            now=self._activity(rank, standing, now),
            place=(place or track.place) if runs else "",
            times=in_words([self._seconds(rank)]),
        )

    def _memory(self, rank: int) -> int:
        """Return the bytes of the device in use, or of the process where the device does not say."""
        return self._tracks[rank].sample.memory or self._seen[rank].memory

    def _seconds(self, rank: int) -> Mapping[Phase, float]:
        """Return where the time of a rank goes: lately, and of a run that has ended, from its first step on."""
        if self._ended is None:
            return self._times[rank].recent()
        whole = self._times[rank].whole()
        return whole.seconds if whole is not None else {}

    def _advice(self) -> str:
        """Return what to try in a run that has ended well, or that the user has ended."""
        if self._state != "done" and self._state not in ENDED_BY_USER:
            return ""
        times = {rank: whole for rank, one in self._times.items() if (whole := one.whole()) is not None}
        if len(times) < len(self._times):
            return ""
        return advice(times, cores=self._facts.cores, on_host=not self._is_on_device())

    def _is_on_device(self) -> bool:
        return any(one.sample.memory or one.sample.utilisation is not None for one in self._tracks.values())

    def _shown_columns(self) -> tuple[str, ...]:
        """Return the columns that have had a value, and that of the CPU at once where no device will have values."""
        by_device = self._is_on_device()
        says_cpu = "CPU" in self._facts.setup and not by_device
        return tuple(name for name, _ in FIGURES if name in self._columns or (name == "cpu" and says_cpu))

    def _gpu(self, ranks: Sequence[int], now: float) -> str:
        ranks = ranks if self._ended is None else ()
        return of_gpu(((self._tracks[rank], self._seen[rank]) for rank in ranks), moved_since=now - STALL)

    def _cpu(self, ranks: Sequence[int]) -> str:
        return of_cpu(self._seen[rank] for rank in ranks) if self._ended is None else ""

    def _activity(self, rank: int, standing: _Standing, now: float) -> str:
        track, seen, slow = self._tracks[rank], self._seen[rank], standing.slow
        if seen.state == "stopped":
            return f"stopped (SIGSTOP, pid {seen.pid})"
        if seen.state == "starting":
            return "starting" if seen.pid is not None else "importing torch"
        if self._failure is not None and rank in self._failure.ranks and self._failure.what:
            return self._failure.what
        if seen.state == "returned":
            early = standing.kind == "late" and standing.step
            return f"returned at step {words.count(track.sample.steps)}" if early else "done"
        if self._ended is not None and self._state == "done":
            return "done"
        if self._state in ENDED_BY_USER and self._failure is None:
            return self._state
        if standing.kind == "bad" and (seen.state in ("failed", "ended") or self._ended is not None):
            return self._failure.what or "failed" if self._failure is not None else "failed"
        if self._ended is not None:
            waited = f" in {METHODS[track.sample.waits_in]}" if track.sample.waits_in is not None else ""
            return self._state if self._state in ENDED_BY_USER else f"stopped{waited}"
        doing = compiling([track], now) or track.doing
        if track.sample.paused:
            return "paused"
        if standing.is_stalled:
            return self._standstill.doing(rank, doing)
        if track.phase is Phase.RUNNING and track.sample.in_loop:
            doing = "between steps"
        if track.phase is Phase.EVALUATING and track.sample.total:
            doing = f"evaluating {words.count(track.sample.step)} / {words.count(track.sample.total)}"
        if track.sample.saves and track.phase is not Phase.SAVING:
            doing += ", saving"
        return slow.words if slow is not None and len(self._tracks) > MOST_ROWS else doing

    def _folded(self, known: dict[int, _Standing], now: float) -> tuple[Row, ...]:
        """Return a row for all ranks and one for each of the first `_OUTLIERS` that stand out; make no others."""
        apart = [rank for rank, one in known.items() if one.kind in ("late", "bad")]
        apart.sort(key=lambda rank: (known[rank].kind != "bad", known[rank].share or 0.0))
        others = [rank for rank in known if rank not in apart] or list(known)
        middle = sorted(others, key=lambda rank: known[rank].share or 0.0)[len(others) // 2]
        of_middle = self._row(middle, known[middle], now)
        doing = Counter(self._activity(rank, known[rank], now) for rank in others).most_common(1)[0]
        memory = max((self._memory(rank) for rank in others), default=0)
        losses = [loss for rank in others if (loss := loss_of(self._tracks[rank].sample)) is not None]
        whole = Row(
            ranks=ranges(list(known)),
            kind="done" if all(known[rank].kind == "done" for rank in others) else "",
            share=of_middle.share,
            step=of_middle.step,
            epoch=of_middle.epoch,
            rate=of_middle.rate,
            loss=words.measured(mean(losses)) if losses else "",
            memory=words.size(memory) if memory else "",
            gpu=self._gpu(others, now),
            cpu=self._cpu(others),
            now=f"{words.plural(len(others), 'rank')}: {_of_several(doing[0])}" if apart else doing[0],
            times=in_words(self._seconds(rank) for rank in others),
        )
        return (whole, *(self._row(rank, known[rank], now) for rank in apart[:_OUTLIERS]))

    # Stalls.

    def _compare(self, now: float) -> None:
        """Find stragglers, once in `_COMPARE_EVERY` seconds: it costs more than the rest of `observe` together."""
        if now >= self._compare_at:
            self._compare_at = now + _COMPARE_EVERY
            self._slow = stragglers(self._tracks)

    def _forget_standstill(self, now: float) -> None:
        """Drop speeds that were measured during a standstill, as soon as all ranks make progress again."""
        stands = bool(self.stalled(now)) or any(one.state == "stopped" for one in self._seen.values())
        if self._stood_still and not stands:
            for track in self._tracks.values():
                track.forget()
            self._slow = {}
        self._stood_still = stands

    def _is_stalled(self, rank: int, track: Track, now: float) -> bool:
        sample = track.sample
        if self._seen[rank].state not in ("running", "stopped") or sample.paused or sample.phase is Phase.COMPILING:
            return False
        began = sample.in_loop or sample.phase is Phase.WAITING or any(not bar.ended for bar in sample.bars)
        return began and now - track.moved_at > STALL

    @property
    def _standstill(self) -> Standstill:
        return Standstill(self._seen, self._tracks, self._stacks)

    def _warnings(self, stalled: set[int], slow: Sequence[str], now: float) -> tuple[str, ...]:
        still = self._standstill.sentences(stalled, now) or ((self._hang,) if self._hang else ())
        if still and self._hang_outcome:
            still = (*still[:-1], f"{still[-1].removesuffix('.')}. {self._hang_outcome}")
        on_now = (*(() if self._is_left else still), *slow) if self._ended is None else ()
        said = warnings_of(track.sample for track in self._tracks.values())
        return (*on_now, *said, *self._not_finite.sentences(len(self._tracks)), *self._jump.sentences())

    # The whole.

    def _sampled(self) -> tuple[int, list[float]] | None:
        samples = [track.sample for track in self._tracks.values()]
        losses = [loss for sample in samples if (loss := loss_of(sample)) is not None and math.isfinite(loss)]
        return (max(sample.steps for sample in samples), losses) if losses else None


def _of_several(doing: str) -> str:
    return f"wait{doing.removeprefix('waits')}" if doing.startswith("waits ") else doing


def _part(done: int, total: int) -> float:
    return min(1.0, done / total) if total else 1.0
