"""Losses that are nan or infinite: on which ranks, and at which steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from nb_accelerate.base import words
from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.notebook.display.findings.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.rank_history import Ranks

_ADVICE = " Clip gradients (accelerator.clip_grad_norm_) or lower the learning rate."


class _Span(NamedTuple):
    """Steps at which the loss of a rank was not finite, and what it was instead, in that order."""

    first: int
    last: int
    what: tuple[str, ...] = ()

    def up_to(self, last: int, what: str) -> _Span:
        """Return it with a later step, and with what the loss was at it."""
        return self._replace(last=last, what=tuple(dict.fromkeys((*self.what, what))))


class NotFinite(Finding):
    """When the losses of ranks were nan or infinite, also when they are finite again."""

    def __init__(self) -> None:
        self._spans: dict[int, _Span] = {}  # from the first such loss to the last
        self._since: dict[int, int] = {}  # the step since which it goes on
        self._saw_steps_before = False

    @override
    def observe(self, ranks: Ranks, now: float) -> None:
        for number, rank in ranks.items():
            loss, step = rank.loss, rank.step
            if loss is not None and not math.isfinite(loss):
                self._since.setdefault(number, step)
                self._spans[number] = self._spans.get(number, _Span(step, step)).up_to(step, words.measured(loss))
            else:
                self._saw_steps_before |= step > 0
                self._since.pop(number, None)

    @override
    def sentences(self, ranks: Ranks, now: float) -> Sequence[str]:
        # Spans that are over are used only if none goes on.
        spans = {number: self._spans[number] for number in sorted(self._since or self._spans)}
        if not spans:
            return ()
        what = " or ".join(dict.fromkeys(what for span in sorted(spans.values()) for what in span.what))
        whose = "" if len(spans) == len(ranks) else f" on {named(list(spans))}"
        if self._since:
            # Where some ranks only have such a loss, their data may be why.
            since = words.count(min(self._since.values()))
            when = (
                f"since about step {since}" if self._saw_steps_before else f"at step {since}, the first that was seen"
            )
            return (f"The loss is {what} {when}{whose}.{'' if whose else _ADVICE}",)
        first = words.count(min(span.first for span in spans.values()))
        last = words.count(max(span.last for span in spans.values()))
        when = f"from about step {first} to {last}" if last != first else f"at about step {first}"
        return (f"The loss was {what} {when}{whose}.",)
