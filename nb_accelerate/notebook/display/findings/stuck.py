"""Sentences about ranks that have not moved for a while: which one is to blame, and who waits where for it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.base import words
from nb_accelerate.base.progress_page import Phase
from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.notebook.display.findings.finding import Finding
from nb_accelerate.notebook.display.rank_history import METHODS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.rank_history import RankHistory, Ranks

STALL = 5.0  # seconds without a change after which a rank that had been moving counts as stalled


def stalled_ranks(ranks: Ranks, now: float) -> set[int]:
    """Return the ranks that were making progress and have made none for `STALL` seconds.

    Also ranks that have not begun to, while others wait for them.
    """
    quiet = {number: rank for number, rank in ranks.items() if now - rank.moved_at > STALL}
    stalled = {number for number, rank in quiet.items() if _has_begun(rank)}
    if any(ranks[number].sample.phase is Phase.WAITING for number in stalled):
        stalled |= {number for number, rank in quiet.items() if rank.status.state == "running"}
    return stalled


def _has_begun(rank: RankHistory) -> bool:
    sample = rank.sample
    if rank.status.state != "running" or sample.phase is Phase.COMPILING:
        return False
    return sample.in_loop or sample.phase is Phase.WAITING or any(not bar.ended for bar in sample.bars)


def waits(rank: RankHistory) -> bool:
    """Return whether a rank waits for others: by its phase, or because its line calls a function for communication."""
    return rank.sample.phase in (Phase.WAITING, Phase.BACKWARD) or bool(rank.called)


class Stuck(Finding):
    """Ranks that do not move: which one is to blame, and who waits where for it."""

    at_end = False

    def __init__(self) -> None:
        self._hang = self._outcome = ""

    @override
    def observe(self, ranks: Ranks, now: float) -> None:
        if any(rank.moved_at == now for rank in ranks.values()):
            self._hang = self._outcome = ""

    def tell(self, hang: str, outcome: str) -> None:
        """Take what others know of ranks that wait; it is told until one of them moves.

        Args:
            hang: a sentence, for where the samples of the ranks show no standstill.
        """
        self._hang, self._outcome = words.capitalized(hang), outcome

    @override
    def sentences(self, ranks: Ranks, now: float) -> Sequence[str]:
        sentences = _standstill(ranks, now) or ([self._hang] if self._hang else [])
        if sentences and self._outcome:
            sentences[-1] = f"{sentences[-1].removesuffix('.')}. {self._outcome}"
        return sentences


def _standstill(ranks: Ranks, now: float) -> list[str]:
    stalled = stalled_ranks(ranks, now)
    waiting = sorted(number for number in stalled if waits(ranks[number]))
    elsewhere = sorted(stalled.difference(waiting))
    returned = [number for number, rank in ranks.items() if rank.status.state == "returned"]
    left_loop = [number for number in waiting if ranks[number].sample.steps and not ranks[number].sample.in_loop]
    waited_in = _location(ranks, waiting)
    who = f"{words.capitalized(named(waiting))} {'waits' if len(waiting) == 1 else 'wait'}"
    if elsewhere and (waiting or len(elsewhere) < len(ranks)):
        # Some stand still outside of a collective: they hold up the others.
        since = words.brief(now - min(ranks[number].moved_at for number in elsewhere))
        text = f"{words.capitalized(named(elsewhere))} {_have(elsewhere)} not moved for {since}"
        text += _location(ranks, elsewhere, ": ")
        if waiting:
            text += f"; {who[0].lower()}{who[1:]} for {'it' if len(elsewhere) == 1 else 'them'}{waited_in}"
        return [f"{text}."]
    if waiting and returned:
        whom = f"{named(returned)}, which {_have(returned)} returned"
        knows_lines = any(ranks[number].location for number in waiting)
        return [f"{who} for {whom}:{waited_in}." if knows_lines else f"{who}{waited_in} for {whom}."]
    if left_loop and len(left_loop) < len(waiting):
        in_loop = [number for number in waiting if number not in left_loop]
        step_counts = sorted({ranks[number].sample.steps for number in left_loop})
        steps = " or ".join(words.plural(count, "step") for count in step_counts)
        wait_left, wait_in_loop = ("waits" if len(numbers) == 1 else "wait" for numbers in (left_loop, in_loop))
        return [
            f"{words.capitalized(named(left_loop))} {_have(left_loop)} left the loop after {steps}, and {wait_left}"
            f"{_location(ranks, left_loop)}; {named(in_loop)} {wait_in_loop}{_location(ranks, in_loop)}."
        ]
    return []


def _location(ranks: Ranks, numbers: Sequence[int], prefix: str = " ") -> str:
    """Return the collective that all of some ranks wait in, and the line at which most of them are."""
    if not numbers:
        return ""
    positions = Counter((collective(ranks[number]), ranks[number].location) for number in numbers)
    (name, line), _ = positions.most_common(1)[0]
    parts = [f"in {name}"] if name and len({name for name, _ in positions}) == 1 else []
    parts += [line] if line else []
    return prefix + ", ".join(parts) if parts else ""


def collective(rank: RankHistory) -> str:
    """Return the collective that a rank is in, as its line calls it; "" if it is in none."""
    inside = rank.sample.waits_in
    return rank.called or (METHODS[inside] if inside is not None else "")


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
