"""What is worth a sentence: the interface of the findings, and the short ones. `state.py` has their list."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from nb_accelerate.base import words
from nb_accelerate.base.topology.rank_lists import named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.rank_history import Ranks


class Finding:
    """Something that is told of the ranks of a run, when it is so."""

    while_on = True  # it is told while the run is on
    at_end = True  # it is told of a run that has ended
    is_advice = False  # it says what to try, and is no sign that something is wrong

    def observe(self, ranks: Ranks, now: float) -> None:
        """Take the newest samples of the ranks."""

    def sentences(self, ranks: Ranks, now: float) -> Sequence[str]:
        """Return what to tell the user; nothing if all is well."""
        raise NotImplementedError


class RankWarnings(Finding):
    """The warnings on the progress pages, each once."""

    @override
    def sentences(self, ranks: Ranks, now: float) -> Sequence[str]:
        return list(dict.fromkeys(rank.sample.warning for rank in ranks.values() if rank.sample.warning))


_ADVICE = " Clip gradients (accelerator.clip_grad_norm_) or lower the learning rate."


class _Span(NamedTuple):
    """Steps at which the loss of a rank was not finite, and what it was instead, in that order."""

    first: int
    last: int
    what: tuple[str, ...] = ()


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
                span = self._spans.get(number, _Span(step, step))
                what = dict.fromkeys((*span.what, words.measured(loss)))
                self._spans[number] = span._replace(last=step, what=tuple(what))
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
