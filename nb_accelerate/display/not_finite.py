"""Losses that are nan or infinite: on which ranks, and since which step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nb_accelerate.display import words
from nb_accelerate.display.track import loss_of
from nb_accelerate.topology.rank_lists import named

if TYPE_CHECKING:
    from nb_accelerate.progress_page import Sample


class NotFiniteLosses:
    """Remember when the loss of a rank became nan or infinite, until it is finite again."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, str]] = {}

    def add(self, rank: int, sample: Sample) -> None:
        """Take the newest sample of a rank."""
        loss = loss_of(sample)
        if loss is None or math.isfinite(loss):
            self._since.pop(rank, None)
        else:
            self._since.setdefault(rank, (sample.steps, words.measured(loss)))

    def sentences(self, num_ranks: int) -> tuple[str, ...]:
        """Return a sentence about them; none while all losses are finite.

        Args:
            num_ranks: number of ranks that are watched.
        """
        if not self._since:
            return ()
        step, what = min(self._since.values())
        whose = "" if len(self._since) == num_ranks else f" on {named(sorted(self._since))}"
        return (f"The loss is {what} since about step {words.count(step)}{whose}.",)
