"""Ranks that are slower than the others, by how much, and what they spend their time on.

Ranks that train together take their steps at the same rate, that of the slowest. It is the one that works while the
others wait for it: so what is compared is the part of the time that a rank works by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import Phase
from nb_accelerate.notebook.display.track import WORDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.notebook.display.track import Track

_FACTOR = 1.3
"""Time of a rank for a step, as a multiple of the others', from which on it counts as slow."""

_WORTH_SAYING = 0.05
"""Smallest excess of the slowest rank, as a part of the median, that the summary of a run mentions."""

_MOST_SENTENCES = 3

_NOISE = 2.0
"""Four standard deviations of a share that was seen at one look: of 64 equal ranks some are always off by three."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A slow rank.

    Attributes:
        factor: how much more time it needs than the median.
        why: what it does in that time.
    """

    factor: float
    why: str

    @property
    def words(self) -> str:
        """Return what a row says about it; a sentence says why."""
        return f"{self.factor:.1f}x slower"


def stragglers(tracks: Mapping[int, Track]) -> dict[int, Straggler]:
    """Return the slow ranks, by rank. Empty if there are none, or if it is too early to say."""
    own = {rank: share for rank, track in tracks.items() if (share := track.own_share()) is not None}
    if len(own) < 2:
        return {}
    found = {}
    rates = {rank: rate for rank, track in tracks.items() if (rate := track.rate)}
    middle_rate = median(rates.values()) if rates else 0.0
    middle = median(own.values())
    for rank, share in own.items():
        factor = 1.0
        if share > middle and share - middle > _NOISE / math.sqrt(tracks[rank].samples_in_loop):
            factor = _factor(share, [value for other, value in own.items() if other != rank])
        rate = rates.get(rank)  # differs for those that do not wait for each other
        if rate and middle_rate / (tracks[rank].rate_at_most or rate) > _FACTOR:
            factor = max(factor, middle_rate / rate)
        if factor > _FACTOR:
            found[rank] = Straggler(factor=min(factor, 99.0), why=_why(tracks[rank]))
    return found if len(found) <= len(own) // 2 else {}


def slow_sentences(slow: Mapping[int, Straggler], num_ranks: int) -> list[str]:
    """Return a sentence about each of the `_MOST_SENTENCES` slowest ranks.

    Args:
        slow: by rank.
    """
    others = "the other" if num_ranks == 2 else "the median"
    slowest = sorted(slow.items(), key=lambda item: -item[1].factor)[:_MOST_SENTENCES]
    return [f"Rank {rank} is {one.factor:.1f}x slower than {others}: {one.why}." for rank, one in sorted(slowest)]


def slowest_of_all(tracks: Mapping[int, Track]) -> tuple[int, float] | None:
    """Return the rank that worked longest by itself, and by which part of the median more; None if none did."""
    own = {rank: share for rank, track in tracks.items() if (share := track.own_share_of_all()) is not None}
    if len(own) < 2:
        return None
    rank = max(own, key=lambda rank: own[rank])
    more = _factor(own[rank], [share for other, share in own.items() if other != rank]) - 1
    return (rank, more) if more > _WORTH_SAYING else None


def _factor(share: float, others: Sequence[float]) -> float:
    """Return how many times longer a rank takes for a step than the median of others would without it.

    What is not its own part of a step is no waiting, as it is the last to come: the others need as much of it. So
    where 0.7 of its time is its own, and 0.2 of theirs, they would take 0.2 + 0.3 for what takes it 1.
    """
    return 1 / max(1 - (share - median(others)), 0.01)


def _why(track: Track) -> str:
    shares = track.shares()
    with_others = (Phase.TRAINING, Phase.BACKWARD, Phase.WAITING)
    own = {phase: share for phase, share in shares.items() if phase not in with_others}
    if not own:
        return "at work"
    phase, share = max(own.items(), key=lambda item: item[1])
    return f"{100 * share:.0f} % {_NAMES.get(phase, WORDS[phase])}"


_NAMES = {
    Phase.RUNNING: "between steps",
    Phase.FORWARD: "in forward",
    Phase.STEP: "in the optimizer's step",
}
