"""One sentence about what slowed a run down most, and what to try; none if nothing did.

It says what was measured, and names no cause that the times of the ranks do not show: who is waited for is the rank
that waits least, and what it does is the phase in which it spent so much more than the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.base.progress_page import Phase
from nb_accelerate.base.progress_page.phase_times import WORK
from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.notebook.display import words
from nb_accelerate.notebook.display.findings.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nb_accelerate.notebook.display.phase_times import RankTimes
    from nb_accelerate.notebook.display.rank_history import Ranks

    Shares = Mapping[int, Mapping[Phase, float]]  # of its time that a rank spent in each phase, by rank

_LEAST_SECONDS = 3.0
"""A shorter run needs no advice, and its times say little."""

_LEAST_STEPS = 20

_WORTH_SAYING = 0.1
"""Least part of the time that advice is about."""

_BETWEEN_STEPS = 0.25
"""The same for time between steps. More, since users' loops do some work of their own there on purpose."""

_LIKE_THE_FIRST = 0.25
"""Part of the difference between the least wait and the median of the others: a rank whose wait exceeds the least by
no more than this is slow too."""

_EXPLAINS = 0.5
"""Part of the difference that a phase makes up if it is named as the reason."""

_BUSY = 80.0
"""Percent. A device that computes for longer has not waited for data."""

_WAITED_FOR = {
    Phase.DATA: ("slower at loading data", ""),
    Phase.FORWARD: ("longer in forward", "Give all ranks equal work there."),
    Phase.BACKWARD: ("longer in backward", "Give all ranks equal work."),
    Phase.STEP: ("longer in the optimizer's step", ""),
    Phase.EVALUATING: ("more evaluation", "Prepare the loader of the evaluation, so that ranks share it."),
    Phase.SAVING: ("longer saving", "Try save_state(..., async_save=True)."),
    Phase.RUNNING: ("more work between steps", "Do that less often."),
}
"""Why ranks wait for one, and what to try; what to try for `Phase.DATA` is from `_workers`."""


@dataclass(frozen=True)
class _Loss:
    """What took time: the share of a rank's time, a clause that says so, a sentence that says what to try or ""."""

    share: float
    what: str
    remedy: str = ""


class Advice(Finding):
    """What slowed a run down most."""

    while_on = False
    is_advice = True

    def __init__(self, cores: int) -> None:
        self._cores = cores

    @override
    def sentences(self, ranks: Ranks, now: float) -> Sequence[str]:
        times = {number: whole for number, rank in ranks.items() if (whole := rank.times.whole()) is not None}
        if len(times) < len(ranks):
            return ()
        found = advice(times, cores=self._cores, on_host=not any(rank.is_on_device for rank in ranks.values()))
        return (found,) if found else ()


def advice(times: Mapping[int, RankTimes], *, cores: int, on_host: bool = True) -> str:
    """Return a sentence, and what to try; "" if nothing is worth one.

    Args:
        times: of all ranks, by rank.
        on_host: the ranks compute on the processor. If not, the time between steps is also that in which the loop waits
            for the device, in ``loss.item()`` say, and nothing is said about it.
    """
    if min(rank.steps for rank in times.values()) < _LEAST_STEPS:
        return ""
    total = mean(sum(rank.seconds.values()) for rank in times.values())
    if total < _LEAST_SECONDS:
        return ""
    shares = {rank: {phase: spent.seconds.get(phase, 0.0) / total for phase in WORK} for rank, spent in times.items()}
    losses = [*_waiting(shares, times, cores), *_everywhere(shares, times, cores, on_host=on_host)]
    if not losses:
        return ""
    worst = max(losses, key=lambda loss: loss.share)
    return f"{words.capitalized(worst.what)}. {worst.remedy}".rstrip()


def _waiting(shares: Shares, times: Mapping[int, RankTimes], cores: int) -> Iterable[_Loss]:
    """Find ranks that the others wait for, and collectives that take long on all of them."""
    if len(shares) < 2 or not all(rank.times_waits for rank in times.values()):
        return
    waits = {rank: share[Phase.WAITING] for rank, share in shares.items()}
    waiting = mean(waits.values())
    did = f", so that {len(shares)} ranks did the work of {len(shares) * (1 - waiting):.1f}"
    speed = did if waiting >= _WORTH_SAYING else ""

    # All of them wait: for the exchange of gradients, or for other collectives.
    least = min(waits.values())
    exchanging = min(rank.exchanging / sum(rank.seconds.values()) for rank in times.values())
    if exchanging >= _WORTH_SAYING:
        what = f"every rank waited {_percent(exchanging)} of the time for the exchange of gradients{speed}"
        yield _Loss(exchanging, what, "Try a larger batch, or gradient_accumulation_steps=4.")
    if least - exchanging >= _WORTH_SAYING:
        what = f"every rank waited {_percent(least - exchanging)} of the time in gather, reduce or barriers{speed}"
        yield _Loss(least - exchanging, what, "Call them less often.")

    # Most of them wait for a few, which wait least.
    cost = median(sorted(waits.values())[1:]) - least
    slow = [rank for rank, wait in waits.items() if wait - least <= _LIKE_THE_FIRST * cost]
    if cost < _WORTH_SAYING or len(slow) > len(waits) // 2:
        return
    others = [rank for rank in waits if rank not in slow]
    excess = {
        phase: mean(shares[rank][phase] for rank in slow) - median(shares[rank][phase] for rank in others)
        for phase in _WAITED_FOR
    }
    phase = max(excess, key=lambda phase: excess[phase])
    why = remedy = ""
    if excess[phase] >= _EXPLAINS * cost:
        reason, remedy = _WAITED_FOR[phase]
        why = f" ({reason})"
        if phase is Phase.DATA:
            remedy = _workers([times[rank] for rank in slow], cores)
    yield _Loss(cost, f"{named(others)} waited {_percent(cost)} of the time for {named(slow)}{why}{speed}", remedy)


def _everywhere(shares: Shares, times: Mapping[int, RankTimes], cores: int, *, on_host: bool) -> Iterable[_Loss]:
    """Find what takes long on all ranks."""
    who = "every rank spent" if len(shares) > 1 else "it spent"

    def loss(phase: Phase, doing: str, remedy: str, worth_saying: float = _WORTH_SAYING) -> Iterable[_Loss]:
        least = min(share[phase] for share in shares.values())
        if least >= worth_saying:
            yield _Loss(least, f"{who} {_percent(least)} of the time {doing}", remedy)

    if not any(rank.utilisation is not None and rank.utilisation > _BUSY for rank in times.values()):
        yield from loss(Phase.DATA, "loading data", _workers(list(times.values()), cores))
    yield from loss(Phase.SAVING, "saving", "Try save_state(..., async_save=True), or save less often.")
    if on_host:
        yield from loss(Phase.RUNNING, "between steps, in your own code", "", _BETWEEN_STEPS)


def _workers(times: Iterable[RankTimes], cores: int) -> str:
    """Say how many workers of the loader would do, so that loading takes no longer than the rest of a step."""
    needed, known = 0, []
    for rank in times:
        if rank.num_workers is None:
            return ""
        loading = rank.seconds.get(Phase.DATA, 0.0)
        rest = sum(spent for phase, spent in rank.seconds.items() if phase not in (Phase.DATA, Phase.WAITING))
        # Workers load during the rest of a step too, and are never done early, or there would be no wait for them.
        work = rank.num_workers * (loading + rest) if rank.num_workers else loading
        needed = max(needed, math.ceil(work / max(rest, 0.01 * loading, 1e-9)) + (not rank.num_workers))
        known.append(rank.num_workers)
    now, tried = max(known), min(needed, cores)
    if tried > now:
        return f"Try num_workers={tried}" + (f" in place of {now}." if now else " in its DataLoader.")
    return f"The num_workers={now} of its DataLoader do not keep up: read less for each batch, or from faster storage."


def _percent(share: float) -> str:
    return words.percent(100 * share)
