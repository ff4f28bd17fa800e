"""`Rehearsal`: what a rehearsal found, as text in a terminal and HTML in a notebook. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from nb_accelerate.base.table import Table
from nb_accelerate.base.topology.rank_lists import ranges
from nb_accelerate.base.words import brief
from nb_accelerate.training.rehearsal.compare import STOPS, alike, findings, place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.training.rehearsal.compare import Finding
    from nb_accelerate.training.rehearsal.trace import Trace

_TITLES = ("ranks", "epochs", "batches", "rows", "evaluated", "steps", "rows a step", "learning rate")


@dataclass(frozen=True)
class Rehearsal:
    """What `rehearse` returns. Shown as a table with a line for each kind of rank, and the findings below it.

    Attributes:
        traces: what each rehearsed rank did, in their order.
        world_size: ranks of the run.
        seconds: that each rank had.
    """

    traces: Sequence[Trace]
    world_size: int
    seconds: float

    @cached_property
    def findings(self) -> list[Finding]:
        """What is wrong or worth a look, the gravest first."""
        return findings(self.traces)

    @property
    def ok(self) -> bool:
        """Whether the ranks stay in step, and none fails, as far as the rehearsal came."""
        return not any(finding.kind in STOPS for finding in self.findings)

    @property
    def table(self) -> Table:
        """A row for each kind of rank; notes below it say what was found, and how far the rehearsal came."""
        rows = [self._row(group) for group in alike(self.traces, lambda trace: repr(trace.summary))]
        signs = [f"{'!' if finding.kind in STOPS else '*'} {finding.text}" for finding in self.findings]
        return Table(_TITLES, rows, right=_TITLES[1:-1], notes=(*signs, self._how_far()))

    def _how_far(self) -> str:
        number = len(self.traces)
        which = (
            f"all {number} ranks"
            if number == self.world_size
            else (f"ranks {ranges([trace.rank for trace in self.traces])} of {self.world_size}")
        )
        took = max((trace.seconds for trace in self.traces), default=0.0)
        said = f"rehearsed {which} in {took:.1f} s"
        late = [trace for trace in self.traces if not trace.ended and not trace.failure]
        if not late:
            return f"{said}, to the end" if any(trace.ended for trace in self.traces) else said
        last = late[0].passes[-1] if late[0].passes else None
        far = (
            "came to no batch"
            if last is None
            else (f"came to batch {len(last.rows)} of pass {len(late[0].passes)} ({place(last.line)})")
        )
        return (
            f"{said}: the {brief(self.seconds)} were over, and rank {late[0].rank} {far}. What comes later is not known"
        )

    def _row(self, group: Sequence[Trace]) -> tuple[str, ...]:
        trace = group[0]
        trained = trace.trained
        other = [one for one in trace.passes if not one.steps]
        per_step = max(set(trace.step_rows), key=trace.step_rows.count) if trace.step_rows else 0
        return (
            ranges([one.rank for one in group]),
            str(len(trained)),
            _same([len(one.rows) for one in trained]),
            _same([sum(one.rows) for one in trained]),
            _same([sum(one.rows) for one in other]),
            ", ".join(str(len(rates)) for rates in trace.rates),
            f"{per_step * self.world_size:,}" if per_step else "",
            "; ".join(_rates(rates) for rates in trace.rates if rates),
        )

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def _same(numbers: Sequence[int]) -> str:
    """Return the number that all are, or the least and the greatest."""
    if not numbers:
        return ""
    return f"{numbers[0]:,}" if len(set(numbers)) == 1 else f"{min(numbers):,}-{max(numbers):,}"


def _rates(rates: Sequence[float]) -> str:
    """Return the first, the greatest and the last rate: ``0.0001 > 0.001 > 0``."""
    chosen = [rates[0], max(rates), rates[-1]]
    shown = [f"{rate:.3g}" for rate in chosen]
    return " > ".join(text for index, text in enumerate(shown) if index == 0 or text != shown[index - 1])
