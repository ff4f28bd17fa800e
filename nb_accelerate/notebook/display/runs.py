"""What runs of `nb_accelerate.runs` are for the panel that shows their ranks: their charts and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_accelerate.base.records import Curve
from nb_accelerate.base.records.kept import earlier, record_of
from nb_accelerate.base.records.naming import labels
from nb_accelerate.notebook.display.view import Chart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nb_accelerate.notebook.display.view import View

_MOST_CHARTS = 8
"""Charts in a panel; `runs` has the rest."""

_EARLIER_RUNS = 3
"""Earlier runs in a chart."""


def charts_of(keys: Iterable[str], settings: Mapping[str, Any] | None = None) -> tuple[Chart, ...]:
    """Return charts of what runs (by id) have logged, each value beside those of earlier runs of the name.

    Args:
        settings: of these runs, which were not told by a tracker.
    """
    found = []
    for key in keys:
        record = record_of(key)
        if record.file:
            continue  # which `runs` draws
        before = earlier(key)[-_EARLIER_RUNS:]
        said = labels(
            [run.name for run in (*before, record)],
            [*(run.config for run in before), {**(settings or {}), **record.config}],
        )
        for name in record.columns:
            others = tuple(
                Curve(label, tuple(old.column(name)))
                for label, old in zip(said, before, strict=False)
                if name in old.columns
            )
            found.append(Chart(curve=Curve(name, tuple(record.column(name))), earlier=others))
    return tuple(found[:_MOST_CHARTS])


def config_of(view: View, keys: Iterable[str]) -> dict[str, Any]:
    """Return the settings of what ranks run: the trackers' config, the function's arguments, the ranks' own."""
    config = {**view.settings, **view.facts.config}
    for key in keys:
        config |= record_of(key).config
    return config
