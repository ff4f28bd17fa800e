"""One sentence about what slowed a run down: loading data, saving, code between the steps, or waiting for a rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.base import words
from nb_accelerate.base.progress_page import Phase
from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.notebook.display.findings.finding import Finding
from nb_accelerate.notebook.display.phase_times import awaited

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.rank_history import RankHistory, Ranks

_LEAST_SECONDS = 3.0  # a shorter run needs no advice, and its times say little
_LEAST_STEPS = 20

_WORTH_SAYING = 0.1  # least part of the time that advice is about
_MOST_OF_IT = 0.5  # part of the time from which on code that is neither the model nor the loader is named
_BUSY = 80  # percent of its time in which a device computes that has not waited for data


class Advice(Finding):
    """What slowed a run down."""

    while_on = False
    is_advice = True

    def __init__(self, cores: int) -> None:
        self._cores = cores

    @override
    def sentences(self, ranks: Ranks, now: float) -> Sequence[str]:
        if min(rank.times.steps for rank in ranks.values()) < _LEAST_STEPS:
            return ()
        loading, slowest = _most(ranks, Phase.DATA)
        saving, _ = _most(ranks, Phase.SAVING)
        is_busy = any((rank.sample.utilisation or 0) > _BUSY for rank in ranks.values())
        if loading >= max(saving, _WORTH_SAYING) and not is_busy:
            who = "It" if len(ranks) == 1 else words.capitalized(named([slowest]))
            sentence = f"{who} spent {words.percent(100 * loading)} of the time loading data."
            return (f"{sentence} {_more_workers(ranks[slowest], self._cores)}".rstrip(),)
        if saving >= _WORTH_SAYING:
            share = words.percent(100 * saving)
            return (f"Saving took {share} of the time. Try save_state(..., async_save=True), or save less often.",)
        between, number = _most(ranks, Phase.RUNNING)
        if between >= _MOST_OF_IT:
            line = ranks[number].line_between_steps
            where = f", most often {line}" if line else ""
            return (f"{words.percent(100 * between)} of the time went to your own code between the steps{where}.",)
        waiting, _ = _most(ranks, Phase.WAITING)
        late = awaited({number: rank.times.whole() for number, rank in ranks.items()})
        if waiting >= _MOST_OF_IT and late:
            return (f"Other ranks waited for {named(late)} for {words.percent(100 * waiting)} of the time.",)
        return ()


def _most(ranks: Ranks, phase: Phase) -> tuple[float, int]:
    """Return the largest share of its time that a rank spent in a phase, and that rank: the others wait for it."""
    shares = {}
    for number, rank in ranks.items():
        seconds = rank.times.whole()
        total = sum(seconds.values())
        shares[number] = seconds.get(phase, 0.0) / total if total >= _LEAST_SECONDS else 0.0
    slowest = max(shares, key=lambda number: shares[number])
    return shares[slowest], slowest


def _more_workers(rank: RankHistory, cores: int) -> str:
    """Say how many workers of the loader would do, so that loading takes no longer than the rest of a step."""
    num_workers = rank.times.num_workers
    if num_workers is None:
        return ""
    seconds = rank.times.whole()
    loading = seconds[Phase.DATA]
    rest_of_step = sum(spent for phase, spent in seconds.items() if phase not in (Phase.DATA, Phase.WAITING))
    # Workers load during the rest of a step too, and are never done early, or there would be no wait for them.
    work = num_workers * (loading + rest_of_step) if num_workers else loading
    advised = min(math.ceil(work / max(rest_of_step, 0.01 * loading)) + (not num_workers), cores)
    if advised > num_workers:
        return f"Try num_workers={advised}" + (f" in place of {num_workers}." if num_workers else " in its DataLoader.")
    return (
        f"The num_workers={num_workers} of its DataLoader do not keep up: read less for each batch, or from "
        "faster storage."
    )
