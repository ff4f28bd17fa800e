"""What trackers of the notebook have logged, as charts of a panel: each value beside those of earlier runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.display.runs import earlier, record_of
from nb_accelerate.display.view import Chart
from nb_accelerate.records import Curve

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST = 8
"""Charts of a panel; `nb_accelerate.runs` has the rest."""

_COMPARED = 3
"""Earlier runs in a chart."""


def charts_of(keys: Iterable[str]) -> tuple[Chart, ...]:
    """Charts of some runs.

    Args:
        keys: their ids, see `nb_accelerate.display.runs.take`.
    """
    found = []
    for key in keys:
        record = record_of(key)
        before = earlier(key, _COMPARED)
        for name in record.columns:
            others = tuple(Curve(old.name, tuple(old.column(name))) for old in before if name in old.columns)
            found.append(Chart(curve=Curve(name, tuple(record.column(name))), earlier=others))
    return tuple(found[:_MOST])
