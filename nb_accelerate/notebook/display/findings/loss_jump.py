"""A loss that jumps up: at which step, and from where to where."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.base import words
from nb_accelerate.notebook.display.findings.finding import Finding
from nb_accelerate.notebook.display.rank_history import mean_loss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.rank_history import Ranks

_BEFORE = 20
"""Losses that the newest is compared with."""

_FACTOR = 10.0
"""Times the median of those, and three times their largest, from which on a loss has jumped: noise does not."""

_TOLD_FOR = 50
"""Losses after a jump in which it is told, once the loss is back where it was; until then it is told in any case."""


class LossJump(Finding):
    """The newest jump of the mean loss of the ranks."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_BEFORE)
        self._step = -1
        self._since = 0
        self._usual = 0.0
        self._sentence = ""

    @override
    def observe(self, ranks: Ranks, now: float) -> None:
        newest = mean_loss(ranks)
        if newest is None or newest[0] <= self._step or not math.isfinite(newest[1]):
            return
        self._step, loss = newest
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

    @override
    def sentences(self, ranks: Ranks, now: float) -> Sequence[str]:
        return (self._sentence,) if self._sentence else ()
