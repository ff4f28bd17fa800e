"""How fast a run goes as a whole, how long it will take, and what it came to."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from nb_accelerate.base import words
from nb_accelerate.base.progress_page import Phase
from nb_accelerate.notebook.display.findings.stuck import STALL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nb_accelerate.notebook.display.rank_history import RankHistory, Ranks

_SHORT = 0.4  # seconds that say nothing about a rate
_SHORT_COMPILING = 2.0  # seconds of compiling that need no number


class Pace:
    """The steps of a run from its first one on: what came before it comes once, and says nothing about the rest."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def add(self, now: float, steps: int) -> None:
        if steps and self._first is None:
            self._first = (now, steps)
        if steps and (self._last is None or steps > self._last[1]):
            self._last = (now, steps)

    @property
    def has_steps(self) -> bool:
        return self._first is not None

    @property
    def rate(self) -> float | None:
        """Return the mean steps per second, evaluations included; None if it is too early to say."""
        if self._first is None or self._last is None:
            return None
        seconds = self._last[0] - self._first[0]
        return (self._last[1] - self._first[1]) / seconds if seconds > _SHORT else None


def compiling(ranks: Iterable[RankHistory], now: float) -> str:
    """Say that programs are compiled, and since when; "" if none of these ranks does."""
    since = [rank.moved_at for rank in ranks if rank.sample.phase is Phase.COMPILING]
    if not since:
        return ""
    seconds = now - min(since)
    return f"compiling for {words.brief(seconds)}" if seconds > _SHORT_COMPILING else "compiling"


def outlook(ranks: Ranks, pace: Pace, now: float) -> tuple[str, ...]:
    """Return what is to be expected of a run that goes on: time left and samples per second, or what it waits for."""
    if compiles := compiling(ranks.values(), now):
        return (compiles,)
    quiet = now - max(rank.moved_at for rank in ranks.values())
    in_loop = any(rank.sample.in_loop for rank in ranks.values())
    if in_loop and quiet > STALL:
        return (f"no step for {words.brief(quiet)}",)
    slowest = min(ranks.values(), key=lambda rank: rank.sample.steps)
    if slowest.whole is not None and pace.rate:
        done, total = slowest.whole
        left: str | None = f"about {words.duration((total - done) / pace.rate)} left"
    else:
        left = slowest.time_left()
    parts = [left] if left is not None else []
    rates = [rank.rate for rank in ranks.values() if rank.rate is not None]
    rate = median(rates) if rates else pace.rate  # it is known at the beginning of an epoch too
    rows = max(rank.sample.rows for rank in ranks.values())
    if rate and rows and in_loop:
        parts.append(f"{words.rate(rate * rows)} samples/s")
    return tuple(parts)


def summary(ranks: Ranks, rate: float | None, rows: int) -> tuple[str, ...]:
    """Return what a run came to: whether it ended early as asked, steps, samples a second, loss, compiled programs."""
    samples = [rank.sample for rank in ranks.values()]
    ended = next((sample.ended_after for sample in samples if sample.ended_after is not None), None)
    parts = [f"ended as asked after epoch {words.count(ended[0])} of {words.count(ended[1])}"] if ended else []
    steps = int(median(rank.steps for rank in ranks.values()))
    parts += [words.plural(steps, "step")] if steps else []
    parts += [f"{words.rate(rate * rows)} samples/s"] if rate and rows else []
    losses = [loss for rank in ranks.values() if (loss := rank.loss) is not None]
    parts += [f"loss {words.measured(sum(losses) / len(losses))}"] if losses else []
    programs, seconds = max((sample.compiled, sample.compiling) for sample in samples)
    parts += [f"{words.plural(programs, 'program')} compiled in {words.brief(seconds)}"] if programs else []
    return tuple(parts)
