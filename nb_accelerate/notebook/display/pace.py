"""How fast a run goes as a whole, how long it will take, and what it came to."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from nb_accelerate.notebook.display import words
from nb_accelerate.notebook.display.compiling import compiled, compiling
from nb_accelerate.notebook.display.findings.stragglers import slowest_of_all
from nb_accelerate.notebook.display.track import loss_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.notebook.display.track import Track

_SHORT = 0.4
"""Seconds that say nothing about a rate."""


class Pace:
    """The steps of a run from its first one on: what came before it comes once, and says nothing about the rest."""

    def __init__(self) -> None:
        self._paused = 0.0
        self._added_at: float | None = None
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def add(self, now: float, steps: int, *, is_paused: bool = False) -> None:
        """Take the number of training steps at the time `now`; time in which training is paused does not count."""
        if is_paused and self._added_at is not None:
            self._paused += now - self._added_at
        self._added_at = now
        now -= self._paused
        if steps and self._first is None:
            self._first = (now, steps)
        if steps and (self._last is None or steps > self._last[1]):
            self._last = (now, steps)

    @property
    def has_steps(self) -> bool:
        """Return whether there was a step."""
        return self._first is not None

    @property
    def rate(self) -> float | None:
        """Return the mean steps per second, evaluations included; None if it is too early to say."""
        if self._first is None or self._last is None:
            return None
        seconds = self._last[0] - self._first[0]
        return (self._last[1] - self._first[1]) / seconds if seconds > _SHORT else None

    def left_of_run(self, track: Track) -> str | None:
        """Estimate how long the whole run will take, by one rank, in words.

        Returns:
            None if its number of steps is not known, or it is too early to say.
        """
        if track.whole is None or not self.rate:
            return None
        done, total = track.whole
        return f"about {words.duration((total - done) / self.rate)} left"


def outlook(tracks: Mapping[int, Track], pace: Pace, now: float, *, stall: float) -> tuple[str, ...]:
    """Return what is to be expected of a run that goes on: time left and samples per second, or what it waits for.

    Args:
        now: `time.monotonic`.
        stall: seconds without a step after which that is said instead.
    """
    if compiles := compiling(tracks.values(), now):
        return (compiles,)
    if all(track.sample.paused for track in tracks.values()):
        return ("paused",)
    quiet = now - max(track.moved_at for track in tracks.values())
    in_loop = any(track.sample.in_loop for track in tracks.values())
    if in_loop and quiet > stall:
        return (f"no step for {words.brief(quiet)}",)
    parts = []
    slowest = min(tracks.values(), key=lambda track: track.sample.steps)
    left = pace.left_of_run(slowest) or slowest.time_left()
    if left is not None:
        parts.append(left)
    rates = [track.rate for track in tracks.values() if track.rate is not None]
    if not rates and pace.rate:  # at the beginning of an epoch
        rates = [pace.rate]
    rows = max(track.sample.rows for track in tracks.values())
    if rates and rows and median(rates) > 0 and in_loop:
        parts.append(f"{words.rate(median(rates) * rows)} samples/s")
    return tuple(parts)


def summary(tracks: Mapping[int, Track], rate: float | None, rows: int) -> tuple[str, ...]:
    """Return what a run came to: whether it ended early as asked, steps, samples per second, loss, compiled programs.

    Args:
        rate: steps per second.
        rows: of all ranks together in one step; 0 if not known.
    """
    steps = int(median(track.sample.steps for track in tracks.values()))
    ended = next((end for track in tracks.values() if (end := track.sample.ended_after) is not None), None)
    parts = (
        [f"ended as asked after epoch {words.count(ended[0])} of {words.count(ended[1])}"] if ended is not None else []
    )
    parts += [words.plural(steps, "step")] if steps else []
    if rate and rows:
        parts.append(f"{words.rate(rate * rows)} samples/s")
    losses = [loss for track in tracks.values() if (loss := loss_of(track.sample)) is not None]
    if losses:
        parts.append(f"loss {words.measured(sum(losses) / len(losses))}")
    if said := compiled(track.sample for track in tracks.values()):
        parts.append(said)
    return tuple(parts)


def remarks(tracks: Mapping[int, Track], peak: int) -> tuple[str, ...]:
    """Return what there is to say about the ranks of a run that has ended.

    Args:
        peak: most bytes that one of them used.
    """
    parts = [words.plural(len(tracks), "rank")]
    slowest = slowest_of_all(tracks)
    if slowest is not None:
        parts.append(f"{'the other' if len(tracks) == 2 else 'others'} waited for rank {slowest[0]}")
    if peak:
        parts.append(f"peak {words.size(peak)}")
    return tuple(parts)
