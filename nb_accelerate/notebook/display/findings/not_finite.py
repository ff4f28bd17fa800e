"""Losses that are nan or infinite: on which ranks, and at which steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.notebook.display import words
from nb_accelerate.notebook.display.track import loss_of

if TYPE_CHECKING:
    from nb_accelerate.base.progress_page import Sample

_ADVICE = " Clip gradients (accelerator.clip_grad_norm_) or lower the learning rate."

_MOST_GAPS = 50
"""Gaps of the curve that are remembered: the newest."""


class _Span(NamedTuple):
    """Steps at which the loss of a rank was not finite, and what it was instead, in that order."""

    first: int
    last: int
    what: tuple[str, ...] = ()

    def up_to(self, last: int, *what: str) -> _Span:
        """Return it with later steps, and with what the loss was at them."""
        return self._replace(last=last, what=tuple(dict.fromkeys((*self.what, *what))))


class NotFiniteLosses:
    """Remember when the losses of ranks were nan or infinite, also when they are finite again."""

    def __init__(self) -> None:
        self._now: dict[int, _Span] = {}
        self._was: dict[int, _Span] = {}
        self._is_again = False
        self._finite: set[int] = set()
        self._gap_from: int | None = None
        self._gaps: list[tuple[float, float]] = []

    def add(self, rank: int, sample: Sample) -> None:
        """Take the newest sample of a rank."""
        loss = loss_of(sample)
        if loss is None or math.isfinite(loss):
            span = self._now.pop(rank, None)
            if span is not None:
                self._keep(rank, span)
            if loss is not None:
                self._finite.add(rank)
                self._end_gap(sample.steps)
            return
        span = self._now.get(rank, _Span(sample.steps, sample.steps))
        self._now[rank] = span.up_to(sample.steps, words.measured(loss))
        self._finite.discard(rank)
        if not self._finite and self._gap_from is None:
            self._gap_from = sample.steps

    @property
    def gaps(self) -> tuple[tuple[float, float], ...]:
        """Return the (first, last) steps at which no rank had a finite loss; infinity for a last one to come."""
        open_gap = ((float(self._gap_from), math.inf),) if self._gap_from is not None else ()
        return (*self._gaps, *open_gap)

    def sentences(self, num_ranks: int) -> tuple[str, ...]:
        """Return a sentence about losses that are not finite, else about those that were; none if all ever were."""
        if self._now:
            whose = _on(self._now, num_ranks)
            since = words.count(min(span.first for span in self._now.values()))
            # Where some ranks only have such a loss, their data may be why.
            return (f"The loss is {_what(self._now)} since about step {since}{whose}.{'' if whose else _ADVICE}",)
        if not self._was:
            return ()
        what = _what(self._was)
        first = min(span.first for span in self._was.values())
        last = max(span.last for span in self._was.values())
        whose = _on(self._was, num_ranks)
        if self._is_again:
            begin, end = words.count(first), words.count(last)
            return (f"The loss was {what} several times{whose}: first at about step {begin}, last at {end}.",)
        when = f"from about step {words.count(first)} to {words.count(last)}"
        return (f"The loss was {what} {when if last > first else f'at about step {words.count(first)}'}{whose}.",)

    def _keep(self, rank: int, span: _Span) -> None:
        """Remember steps that are over; those of the same rank that are not next to them too."""
        before = self._was.get(rank)
        self._is_again |= before is not None
        self._was[rank] = span if before is None else before.up_to(span.last, *span.what)

    def _end_gap(self, step: int) -> None:
        if self._gap_from is None:
            return
        self._gaps = [*self._gaps, (float(self._gap_from), float(max(self._gap_from, step)))][-_MOST_GAPS:]
        self._gap_from = None


def _what(ranks: dict[int, _Span]) -> str:
    return " or ".join(dict.fromkeys(what for span in sorted(ranks.values()) for what in span.what))


def _on(ranks: dict[int, _Span], num_ranks: int) -> str:
    return "" if len(ranks) == num_ranks else f" on {named(sorted(ranks))}"
