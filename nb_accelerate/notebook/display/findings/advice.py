"""One sentence about what slowed a run down most, and what to try; none if nothing did.

It says what was measured, and names no cause that the times of the ranks do not show: who is waited for is the rank
that waits least, and what it does is the phase in which it spent so much more than the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import Phase
from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.notebook.display import words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nb_accelerate.notebook.display.phase_times import RankTimes

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
    Phase.DATA: ("loads data more slowly", ""),
    Phase.FORWARD: ("takes longer in forward", "Give all ranks equal work there."),
    Phase.BACKWARD: ("takes longer in backward", "Give all ranks equal work."),
    Phase.STEP: ("takes longer in the optimizer's step", ""),
    Phase.EVALUATING: ("evaluates more", "Prepare the loader of the evaluation, so that ranks share it."),
    Phase.SAVING: ("saves for longer", "Try save_state(..., async_save=True)."),
    Phase.RUNNING: ("does more between steps", "Let it do that less often."),
}
"""What a rank that is waited for does, and what to try; what to try for `Phase.DATA` is from `_workers`."""

_VERBS = {"loads": "load", "takes": "take", "evaluates": "evaluate", "saves": "save", "does": "do"}


@dataclass(frozen=True)
class _Finding:
    """What took time.

    Attributes:
        share: of the time of a rank.
        what: a clause that says so.
        remedy: a sentence that says what to try; "" if that is not known.
        is_wait: it is time in which ranks wait for others.
    """

    share: float
    what: str
    remedy: str = ""
    is_wait: bool = False


def advice(times: Mapping[int, RankTimes], *, cores: int, on_host: bool = True) -> str:
    """Return a sentence, and what to try; "" if nothing is worth one.

    Args:
        times: of all ranks, by rank.
        on_host: the ranks compute on the processor. If not, the time between steps is also that in which the loop waits
            for the device, in ``loss.item()`` say, and nothing is said about it.
    """
    if not times or min(one.steps for one in times.values()) < _LEAST_STEPS:
        return ""
    total = mean(sum(one.seconds.values()) for one in times.values())
    if total < _LEAST_SECONDS:
        return ""
    shares = {rank: {phase: spent / total for phase, spent in one.seconds.items()} for rank, one in times.items()}
    found = [*_waiting(shares, times, cores), *_everywhere(shares, times, cores, on_host=on_host)]
    if not found:
        return ""
    worst = max(found, key=lambda one: one.share)
    what = f"{worst.what}{_speed(shares) if worst.is_wait else ''}."
    return " ".join([words.capitalized(what), *([worst.remedy] if worst.remedy else [])])


def _speed(shares: Mapping[int, Mapping[Phase, float]]) -> str:
    """Say how many ranks that never wait would have done as much; "" if nearly all of them."""
    waiting = mean(_of(one, Phase.WAITING) for one in shares.values())
    if waiting < _WORTH_SAYING:
        return ""
    return f", so that {len(shares)} ranks did the work of {len(shares) * (1 - waiting):.1f}"


def _waiting(
    shares: Mapping[int, Mapping[Phase, float]], times: Mapping[int, RankTimes], cores: int
) -> Iterable[_Finding]:
    """Find ranks that the others wait for, and collectives that take long on all of them."""
    if len(shares) < 2 or not _knows_waits(times):
        return
    waits = {rank: _of(one, Phase.WAITING) for rank, one in shares.items()}
    least = min(waits.values())
    exchanging = min(one.exchanging / sum(one.seconds.values()) for one in times.values())
    if exchanging >= _WORTH_SAYING:
        what = f"every rank waited {_percent(exchanging)} of the time for the exchange of gradients"
        yield _Finding(exchanging, what, "Try a larger batch, or gradient_accumulation_steps=4.", is_wait=True)
    if least - exchanging >= _WORTH_SAYING:
        what = f"every rank waited {_percent(least - exchanging)} of the time in gather, reduce or barriers"
        yield _Finding(least - exchanging, what, "Call them less often.", is_wait=True)
    cost = median(sorted(waits.values())[1:]) - least
    slow = [rank for rank, one in waits.items() if one - least <= _LIKE_THE_FIRST * cost]
    if cost < _WORTH_SAYING or len(slow) > len(waits) // 2:
        return
    others = [rank for rank in waits if rank not in slow]
    excess = {
        phase: mean(_of(shares[rank], phase) for rank in slow) - median(_of(shares[rank], phase) for rank in others)
        for phase in _WAITED_FOR
    }
    phase = max(excess, key=lambda one: excess[one])
    what = f"{named(others)} waited {_percent(cost)} of the time for {named(slow)}"
    remedy = ""
    if excess[phase] >= _EXPLAINS * cost:
        does, remedy = _WAITED_FOR[phase]
        verb, _, rest = does.partition(" ")
        what += f", which {verb if len(slow) == 1 else _VERBS[verb]} {rest}"
        if phase is Phase.DATA:
            remedy = _workers([times[rank] for rank in slow], cores)
    yield _Finding(cost, what, remedy, is_wait=True)


def _everywhere(
    shares: Mapping[int, Mapping[Phase, float]], times: Mapping[int, RankTimes], cores: int, *, on_host: bool
) -> Iterable[_Finding]:
    """Find what takes long on all ranks."""
    least = {phase: min(_of(one, phase) for one in shares.values()) for phase in _WAITED_FOR}

    def spent(phase: Phase, doing: str) -> str:
        who = "every rank spent" if len(shares) > 1 else "it spent"
        return f"{who} {_percent(least[phase])} of the time {doing}"

    is_busy = any(one.utilisation is not None and one.utilisation > _BUSY for one in times.values())
    if least[Phase.DATA] >= _WORTH_SAYING and not is_busy:
        remedy = _workers(list(times.values()), cores)
        yield _Finding(least[Phase.DATA], spent(Phase.DATA, "loading data"), remedy)
    if least[Phase.SAVING] >= _WORTH_SAYING:
        remedy = "Try save_state(..., async_save=True), or save less often."
        yield _Finding(least[Phase.SAVING], spent(Phase.SAVING, "saving"), remedy)
    if on_host and least[Phase.RUNNING] >= _BETWEEN_STEPS:
        yield _Finding(least[Phase.RUNNING], spent(Phase.RUNNING, "between steps, in your own code"))


def _workers(times: Iterable[RankTimes], cores: int) -> str:
    """Say how many workers of the loader would do, so that loading takes no longer than the rest of a step."""
    needed, known = 0, []
    for one in times:
        if one.num_workers is None:
            return ""
        loading = one.seconds.get(Phase.DATA, 0.0)
        rest = sum(spent for phase, spent in one.seconds.items() if phase not in (Phase.DATA, Phase.WAITING))
        # Workers load during the rest of a step too, and are never done early, or there would be no wait for them.
        work = one.num_workers * (loading + rest) if one.num_workers else loading
        needed = max(needed, math.ceil(work / max(rest, 0.01 * loading, 1e-9)) + (not one.num_workers))
        known.append(one.num_workers)
    now, tried = max(known), min(needed, cores)
    if tried > now:
        return f"Try num_workers={tried}" + (f" in place of {now}." if now else " in its DataLoader.")
    return f"The num_workers={now} of its DataLoader do not keep up: read less for each batch, or from faster storage."


def _knows_waits(times: Mapping[int, RankTimes]) -> bool:
    return all(one.times_waits for one in times.values())


def _of(shares: Mapping[Phase, float], phase: Phase) -> float:
    return shares.get(phase, 0.0)


def _percent(share: float) -> str:
    return words.percent(100 * share)
