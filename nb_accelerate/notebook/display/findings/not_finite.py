"""Losses that are nan or infinite: on which ranks, and at which steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.notebook.display import words
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

    def up_to(self, last: int, *what: str) -> _Span:
        """Return it with later steps, and with what the loss was at them."""
        return self._replace(last=last, what=tuple(dict.fromkeys((*self.what, *what))))


class NotFinite(Finding):
    """When the losses of ranks were nan or infinite, also when they are finite again."""

    def __init__(self) -> None:
        self._now: dict[int, _Span] = {}
        self._was: dict[int, _Span] = {}
        self._is_again = False

    @override
    def observe(self, ranks: Ranks, now: float) -> None:
        for number, rank in ranks.items():
            loss, step = rank.loss, rank.sample.steps
            if loss is not None and not math.isfinite(loss):
                self._now[number] = self._now.get(number, _Span(step, step)).up_to(step, words.measured(loss))
            elif number in self._now:
                span = self._now.pop(number)
                self._is_again |= number in self._was
                self._was[number] = self._was.get(number, span).up_to(span.last, *span.what)

    @override
    def sentences(self, ranks: Ranks, now: float) -> Sequence[str]:
        spans = self._now or self._was  # of those that are over only if none goes on
        if not spans:
            return ()
        what = " or ".join(dict.fromkeys(what for span in sorted(spans.values()) for what in span.what))
        whose = "" if len(spans) == len(ranks) else f" on {named(sorted(spans))}"
        first = words.count(min(span.first for span in spans.values()))
        last = words.count(max(span.last for span in spans.values()))
        if self._now:
            # Where some ranks only have such a loss, their data may be why.
            return (f"The loss is {what} since about step {first}{whose}.{'' if whose else _ADVICE}",)
        if self._is_again:
            return (f"The loss was {what} several times{whose}: first at about step {first}, last at {last}.",)
        when = f"from about step {first} to {last}" if last != first else f"at about step {first}"
        return (f"The loss was {what} {when}{whose}.",)
