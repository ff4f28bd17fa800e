"""What samples of a rank's progress page, taken one after the other, say about its speed, phases and loss."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from nb_accelerate.base import words
from nb_accelerate.base.progress_page import Activity, Collective, Phase, Sample
from nb_accelerate.base.records.record import is_training_loss
from nb_accelerate.errors.traceback_lines import line_in_cell
from nb_accelerate.notebook.display.phase_times import PhaseTimes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.base.progress_page import CodeLine

_WINDOW = 4.0  # seconds of samples from which the rate is computed
_SHORT = 0.4  # seconds of samples that are too few to compute a rate

# Seconds of an epoch or evaluation from which on its end is shown, where the end of the run is not known.
_LONG_EPOCH = 30.0

_LONG = 10.0  # seconds for which samples are kept, and from which the shares of phases are computed
_RECENT = 1.5  # seconds of samples whose most frequent phase is shown; the newest phase alone would flicker

PHASES = {
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
    Phase.PREPARING: "preparing the model",
    Phase.COMPILING: "compiling",
    Phase.TRAINING: "forward and backward",
}

# What users call for a collective.
METHODS = {
    Collective.all_gather: "gather",
    Collective.all_reduce: "reduce",
    Collective.broadcast: "broadcast",
    Collective.scatter: "scatter",
    Collective.all_gather_object: "gather_object",
    Collective.broadcast_object: "broadcast_object_list",
    Collective.barrier: "wait_for_everyone",
    Collective.backward: "backward",
}

_ENOUGH = 20  # samples of a rank before something is said about its time

# Phases in which a rank may be waiting for the slowest one.
WITH_OTHERS = (Phase.TRAINING, Phase.BACKWARD, Phase.WAITING)


Ranks: TypeAlias = "Mapping[int, RankHistory]"  # the ranks of a run, by rank


class _Moment(NamedTuple):
    time: float
    loop: int
    step: int
    activity: Activity


@dataclass(frozen=True, kw_only=True)
class RankObservation:
    """The state of a rank at one moment, read from outside: its progress page and its process."""

    rank: int
    sample: Sample = field(default_factory=Sample)
    state: str = "running"  # or ``starting``, ``returned``, ``failed``, ``ended``
    memory: int = 0  # bytes of its process
    pid: int | None = None  # None while it starts
    sending: tuple[int, int] = (0, 0)  # bytes that are still to be sent to its machine, and in all
    machine: str = ""  # its name; "" for this one, where its process can be looked at


_KEPT_LINES = 10  # Lines. The most frequent one is shown: what changes each time is no news, but flicker.


class CodeLines:
    """The lines of the user's code that a rank was seen at lately, and the one to show."""

    def __init__(self) -> None:
        self._recent: deque[CodeLine] = deque(maxlen=_KEPT_LINES)

    def add(self, line: CodeLine | None) -> None:
        """Add what a sample says; the same one counts once."""
        if line is None:  # of a call or cell that has just begun
            self._recent.clear()
        elif not self._recent or line.number != self._recent[-1].number:
            self._recent.append(line)

    def at(self, activity: Activity, entered: int) -> CodeLine | None:
        """Return the line at which it did that most often, the newest one of equals; None if it was not seen so.

        Args:
            entered: when the current phase began. Lines that were read in it count alone, if there are any.
        """
        seen = [line for line in reversed(self._recent) if line.activity == activity]
        seen = [line for line in seen if line.entered == entered] or seen
        counted = Counter((line.filename, line.lineno, line.called, line.inside) for line in seen)
        if not counted:
            return None
        most = counted.most_common(1)[0][0]
        return next(line for line in seen if (line.filename, line.lineno, line.called, line.inside) == most)


class RankHistory:
    """The recent past of a rank, and where its time went.

    Attributes:
        whole: batches of the whole run so far, and of how many; None if the latter is not known.
    """

    def __init__(self, rank: int, now: float) -> None:
        self.status = RankObservation(rank=rank, state="starting")
        self.moved_at = now
        self.lines = CodeLines()
        self.times = PhaseTimes()
        self.whole: tuple[int, int] | None = None
        self._trained: Sample | None = None  # the newest that trains
        self._progress = _progress(self.sample)
        self._moments: deque[_Moment] = deque()

    @property
    def sample(self) -> Sample:
        """What its page said last."""
        return self.status.sample

    @property
    def memory(self) -> int:
        """Bytes of the device in use, or of the process where the device does not say."""
        return self.sample.memory or self.status.memory

    @property
    def step(self) -> int:
        """Return the step of the whole run, with those before it was resumed; of this process if that is not known."""
        return self.whole[0] if self.whole is not None else self.sample.steps

    @property
    def steps(self) -> int:
        """Return how many steps were taken, with those before it was resumed if all epochs were gone through."""
        return self.step if self.whole is not None and self.whole[0] == self.whole[1] else self.sample.steps

    @property
    def in_epoch(self) -> tuple[int, int | None]:
        """Return batches of the epoch so far, and of how many; those of the training while an evaluation runs."""
        sample, trained = self.sample, self._trained
        if trained is None or sample.trains:
            return sample.step, sample.total
        # The loop may have taken steps since it was seen last, which it counts when it ends or another begins inside.
        step = max(trained.step, sample.steps_before - trained.steps_before)
        return step if trained.total is None else min(step, trained.total), trained.total

    @property
    def loss(self) -> float | None:
        """The newest loss: one that was logged by that name, else what `backward` was called on."""
        for name, value in self.sample.scalars.items():
            if is_training_loss(name):
                return value
        return self.sample.loss

    def add(self, now: float, status: RankObservation) -> None:
        sample = status.sample
        progress = _progress(sample)
        if progress != self._progress:
            self._progress, self.moved_at = progress, now
        self.status = status
        self.lines.add(sample.line)
        self.times.add(now, sample)
        self.whole = _whole(sample, self.whole)
        if sample.trains:
            self._trained = sample
        self._drop_cached()
        self._moments.append(_Moment(now, sample.loop, sample.step, sample.activity))
        while self._moments[0].time < now - _LONG:
            self._moments.popleft()

    def forget(self) -> None:
        """Drop earlier samples, which say nothing about the speed after a standstill."""
        self._moments.clear()
        self._drop_cached()

    def _drop_cached(self) -> None:
        for name in ("_pace", "activity", "line"):
            self.__dict__.pop(name, None)

    @property
    def rate(self) -> float | None:
        """Return the current loop's steps per second in the last `_WINDOW` seconds; None if it is too early to say."""
        return self._pace[0] / self._pace[1] if self._pace is not None else None

    @property
    def rate_at_most(self) -> float | None:
        """Return `rate` with one step more: of two equally fast ranks, one may have taken one just after the sample."""
        return (self._pace[0] + 1) / self._pace[1] if self._pace is not None else None

    @cached_property  # until `_drop_cached` removes it, at the next sample
    def _pace(self) -> tuple[int, float] | None:
        """Return the number of recent steps and the seconds that they took; None if it is too early to say."""
        # Taken from a step to a step, if there were two: in a window of four seconds there are three steps of 1.2
        # seconds at times, and four at others, and a rate that jumps between the two would be wrong both times.
        if not self._moments:
            return None
        # Backwards from the newest sample: `last` is the one at the newest step, `first` at the oldest in the window.
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
                # If the step that has not ended has already taken longer than the mean, the rate falls.
                return steps, max(seconds, (newest.time - first.time) * steps / (steps + 1))
        seconds = newest.time - oldest.time
        return (newest.step - oldest.step, seconds) if seconds > _SHORT else None

    @cached_property
    def activity(self) -> Activity:
        """Return what it did most often in the last `_RECENT` seconds; of a loop that began later, since then."""
        # The newest activity alone would flicker.
        if not self._moments:
            return Activity()
        newest = self._moments[-1]
        if newest.activity.phase in (Phase.ENDED, Phase.NOTHING):
            return newest.activity
        since = newest.time - _RECENT
        loop = newest.activity[2:]
        recent = [moment.activity for moment in reversed(self._moments) if moment.time > since]
        return Counter(activity for activity in recent if activity[2:] == loop).most_common(1)[0][0]

    @cached_property
    def line(self) -> CodeLine | None:
        """Return the line of the user's code to show: where it does `activity`; None if it was not seen there."""
        # All that is said of a rank at a time comes from it: a phase and a line of two moments may never have met.
        return self.lines.at(self.activity, self.sample.entered)

    @property
    def called(self) -> str:
        """Return the function for communication that the user's line has called, as it stands there; "" if none."""
        return self.line.called if self.line is not None else ""

    @property
    def doing(self) -> str:
        """Return in a few words what it does mostly: the phase, or the collective that it waits in."""
        line = self.line
        phase, waits_in, in_loop, evaluates = self.activity
        inside = line.inside if line is not None else ""
        if inside == "compiling" or inside.startswith("importing "):
            return inside
        sample = self.sample
        if evaluates and sample.evaluates and sample.in_loop:
            of = f" / {words.count(sample.total)}" if sample.total else ""
            return f"evaluation {words.count(sample.step)}{of}"
        if phase is Phase.RUNNING and in_loop:
            return "between steps"
        if phase is Phase.RUNNING and inside:
            return f"running {inside}"
        if waits_in is None:
            return PHASES[phase]
        called = line.called if line is not None and waits_in is not Collective.backward else ""
        return f"waits in {called or METHODS[waits_in]}"

    @property
    def location(self) -> str:
        """Return the line of the user's code that it is at while it does that; "" if none is known."""
        return _place(self.line)

    @property
    def line_between_steps(self) -> str:
        """Return the line of the user's code at which it was most often lately between steps; "" if none is known."""
        return _place(self.lines.at(Activity(Phase.RUNNING, in_loop=True), entered=0))

    @property
    def samples_in_loop(self) -> int:
        """Return the number of recent samples that were taken in the current loop."""
        loop = self.sample.loop
        return sum([moment.loop == loop for moment in self._moments])

    def shares(self) -> dict[Phase, float]:
        """Return the share of its recent time, from 0 to 1, spent in each phase; empty if it is too early to say."""
        # Its longest stay in one is left out: who was held up once is not slow.
        current = self.sample.loop
        in_loop = [(step, activity.phase) for _, loop, step, activity in self._moments if loop == current]
        stays = [(phase, len(list(same))) for (_, phase), same in groupby(in_loop)]
        if not stays:
            return {}
        stays.remove(max(stays, key=itemgetter(1)))
        number = sum(length for _, length in stays)
        if number < _ENOUGH:
            return {}
        found: Counter[Phase] = Counter()
        for phase, length in stays:
            found[phase] += length
        return {phase: length / number for phase, length in found.items()}

    def time_left(self) -> str | None:
        """Estimate how long it will take, in words; None if nothing is known.

        By the outermost progress bar, else by the current loop, which the words then say.
        """
        sample = self.sample
        inner = sample.step / sample.total if sample.total and sample.in_loop else 0.0
        for bar in sample.bars:
            if not bar.ended and bar.total and bar.level == 0:
                done = min(1.0, (bar.count + inner) / bar.total)
                if done > 0.01 and bar.seconds > 1:
                    return f"about {words.duration(bar.seconds * (1 - done) / done)} left"
                return None
        if sample.total and sample.in_loop and self.rate:
            left = f"{words.duration((sample.total - sample.step) / self.rate)} left"
            if sample.spans_epochs:
                return f"about {left}"
            if sample.total / self.rate >= _LONG_EPOCH:
                return f"{left} of this {'evaluation' if sample.evaluates else 'epoch'}"
        return None

    def own_share(self) -> float | None:
        """Return the share of its recent time in which it cannot have waited for others; None if it is too early."""
        shares = self.shares()
        return 1 - sum(shares.get(phase, 0.0) for phase in WITH_OTHERS) if shares else None


def mean_loss(ranks: Ranks) -> tuple[int, float] | None:
    """Return the step and the mean of the losses that are finite; nan if there are others only, None without any."""
    losses = [loss for rank in ranks.values() if (loss := rank.loss) is not None]
    if not losses:
        return None
    finite = [loss for loss in losses if math.isfinite(loss)]
    return max(rank.step for rank in ranks.values()), sum(finite) / len(finite) if finite else math.nan


def _whole(sample: Sample, before: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return how far the run is; while it does something else than to train, as far as it was."""
    is_first = not sample.trains and not sample.steps_before  # there was no backward yet
    if is_first and sample.evaluates:
        return None
    if not sample.total or not (sample.trains or is_first):
        return before  # an evaluation between epochs, say
    if sample.spans_epochs:
        return min(sample.step, sample.total), sample.total
    if not sample.epochs:
        return None
    total = sample.epochs * sample.total
    return min((sample.epoch - 1) * sample.total + sample.step, total), total


def _place(line: CodeLine | None) -> str:
    if line is None:
        return ""
    return line_in_cell(line.filename, line.lineno) or f"{PurePath(line.filename).name}:{line.lineno}"


def _progress(sample: Sample) -> tuple[object, ...]:
    return (
        sample.request,
        sample.loop,
        sample.step,
        sample.phase,
        sample.collectives,
        tuple((bar.count, bar.ended) for bar in sample.bars),
    )
