"""A loss that jumps up: at which step, and from where to where."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING

from nb_accelerate.notebook.display import words

if TYPE_CHECKING:
    from collections.abc import Sequence

_BEFORE = 20
"""Losses that the newest is compared with."""

_FACTOR = 10.0
"""Times the median of those, and three times their largest, from which on a loss has jumped: noise does not."""

_TOLD_FOR = 50
"""Losses after a jump in which it is told, once the loss is back where it was; until then it is told in any case."""


class LossJump:
    """Remember the newest jump of the mean loss of the ranks."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_BEFORE)
        self._step = -1
        self._since = 0
        self._usual = 0.0
        self._sentence = ""

    def add(self, sampled: tuple[int, Sequence[float]] | None) -> None:
        """Take finite losses of the ranks at a step; None if there are none. A step that is not new is left out."""
        if sampled is None or sampled[0] <= self._step:
            return
        self._step, losses = sampled
        loss = sum(losses) / len(losses)
        if self._sentence:
            self._since += 1
            if loss <= _FACTOR * self._usual and self._since > _TOLD_FOR:
                self._sentence = ""
        elif len(self._last) == _BEFORE and min(self._last) > 0:
            usual = median(self._last)
            if loss > _FACTOR * usual and loss > 3 * max(self._last):
                self._since, self._usual = 0, usual
                rise = f"from {words.measured(usual)} to {words.measured(loss)}"
                self._sentence = f"The loss jumped {rise} at about step {words.count(self._step)}."
        self._last.append(loss)

    def sentences(self) -> tuple[str, ...]:
        """Return a sentence about it; none if there was none lately."""
        return (self._sentence,) if self._sentence else ()
