"""Charts of what ranks log with ``log_with="notebook"``, in their panel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.base.records import Curve
from nb_accelerate.base.records.kept import earlier, record_of
from nb_accelerate.notebook.display.view import Chart

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_CHARTS = 8
"""Charts in a panel; `runs` has the rest."""

_EARLIER_RUNS = 3
"""Earlier runs in a chart."""


def charts_of(keys: Iterable[str]) -> tuple[Chart, ...]:
    """Return charts of what runs (by id) have logged, each value beside those of earlier runs of the name."""
    found = []
    for key in keys:
        record = record_of(key)
        before = earlier(key)[-_EARLIER_RUNS:]
        for name in record.columns:
            others = tuple(Curve(old.name, tuple(old.column(name))) for old in before if name in old.columns)
            found.append(Chart(curve=Curve(name, tuple(record.column(name))), earlier=others))
    return tuple(found[:_MOST_CHARTS])
