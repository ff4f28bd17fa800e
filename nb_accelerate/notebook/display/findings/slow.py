"""Ranks that are slower than the others, by how much, and what they spend their time on.

Ranks that train together take their steps at the rate of the slowest. It works while the others wait for it: so
the part of the time that each rank works by itself is compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.base.progress_page import Phase
from nb_accelerate.notebook.display.findings.finding import Finding
from nb_accelerate.notebook.display.findings.stuck import stalled_ranks
from nb_accelerate.notebook.display.rank_history import PHASES, WITH_OTHERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.notebook.display.rank_history import RankHistory, Ranks

_FACTOR = 1.3  # time of a rank for a step, as a multiple of the others', from which on it counts as slow
_MOST_SENTENCES = 3

_COMPARE_EVERY = 1.0  # seconds between two comparisons of the ranks

# Four standard deviations of a share that was sampled once: of 64 equal ranks some are always off by three.
_NOISE = 2.0


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A slow rank: how many times more time it needs than the median, and what it does in that time."""

    factor: float
    why: str

    @property
    def words(self) -> str:
        """What a row says about it; a sentence says why."""
        return f"{self.factor:.1f}x slower"


class Slow(Finding):
    """Ranks that are slower than the others.

    Attributes:
        stragglers: the slow ranks, by rank. None while a rank stands still, which says nothing about speed.
    """

    at_end = False

    def __init__(self) -> None:
        self.stragglers: Mapping[int, Straggler] = {}
        self._stood_still = False
        self._compare_at = 0.0

    @override
    def observe(self, ranks: Ranks, now: float) -> None:
        stands_still = bool(stalled_ranks(ranks, now))
        if stands_still:
            self.stragglers = {}
        elif self._stood_still:  # all make progress again: drop speeds that were measured meanwhile
            for rank in ranks.values():
                rank.forget()
        elif now >= self._compare_at:  # not at each sample: it costs more than all the rest
            self._compare_at = now + _COMPARE_EVERY
            self.stragglers = _stragglers(ranks)
        self._stood_still = stands_still

    @override
    def sentences(self, ranks: Ranks, now: float) -> Sequence[str]:
        others = "the other" if len(ranks) == 2 else "the median"
        slowest = sorted(self.stragglers.items(), key=lambda item: -item[1].factor)[:_MOST_SENTENCES]
        return [f"Rank {rank} is {slow.words} than {others}: {slow.why}." for rank, slow in sorted(slowest)]


def _stragglers(ranks: Ranks) -> dict[int, Straggler]:
    """Return the slow ranks, by rank. Empty if there are none, or if it is too early to say."""
    own_shares = {number: share for number, rank in ranks.items() if (share := rank.own_share()) is not None}
    if len(own_shares) < 2:
        return {}
    stragglers = {}
    rates = {number: rate for number, rank in ranks.items() if (rate := rank.rate)}
    median_rate = median(rates.values()) if rates else 0.0
    median_share = median(own_shares.values())
    for number, share in own_shares.items():
        factor = 1.0
        if share > median_share and share - median_share > _NOISE / math.sqrt(ranks[number].samples_in_loop):
            # What is not its own part of a step is no waiting, as it is the last to come: the others need as much of
            # it. Where 0.7 of its time is its own, and 0.2 of theirs, they would take 0.2 + 0.3 for what takes it 1.
            others_share = median(value for other, value in own_shares.items() if other != number)
            factor = 1 / max(1 - (share - others_share), 0.01)
        rate = rates.get(number)  # differs for ranks that do not wait for each other
        if rate and median_rate / (ranks[number].rate_at_most or rate) > _FACTOR:
            factor = max(factor, median_rate / rate)
        if factor > _FACTOR:
            stragglers[number] = Straggler(factor=min(factor, 99.0), why=_why(ranks[number]))
    return stragglers if len(stragglers) <= len(own_shares) // 2 else {}


def _why(rank: RankHistory) -> str:
    own_shares = {phase: share for phase, share in rank.shares().items() if phase not in WITH_OTHERS}
    if not own_shares:
        return "at work"
    phase, share = max(own_shares.items(), key=lambda item: item[1])
    return f"{100 * share:.0f} % {_NAMES.get(phase, PHASES[phase])}"


_NAMES = {Phase.RUNNING: "between steps", Phase.FORWARD: "in forward", Phase.STEP: "in the optimizer's step"}
