"""Runs that were logged with ``log_with="notebook"``: kept as long as the notebook's kernel, to be compared."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.records import Curve, RunRecord
from nb_accelerate.notebook.display.view import Chart

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_CHARTS = 8
"""Charts in a panel; `runs` has the rest."""

_EARLIER_RUNS = 3
"""Earlier runs in a chart."""

_records: dict[str, RunRecord] = {}
"""By the id their trackers gave them, in the order in which they began."""

_projects: dict[str, str] = {}


def runs() -> list[RunRecord]:
    """Return the runs logged with ``log_with="notebook"`` since the kernel started, the first one first.

    Shown in a cell, a run draws its curves; ``run.column("loss")`` has the values, ``run.config`` the settings.
    """
    return list(_records.values())


def take(data: bytes) -> str | None:
    """Note what a tracker in a rank sent. Returns the run's id; None if it makes no sense."""
    try:
        entry: dict[str, Any] = json.loads(data)
        key, config = str(entry["run"]), dict(entry.get("config", {}))
    except (ValueError, KeyError, TypeError):
        return None
    record = _records.get(key)
    if record is None:
        project = str(entry.get("name", "run"))
        number = 1 + sum(other == project for other in _projects.values())
        _projects[key] = project
        record = _records[key] = RunRecord(name=project if number == 1 else f"{project}-{number}")
    record.config.update(config)
    if isinstance(entry.get("row"), dict):
        record.add(entry["row"])
    return key


def charts_of(keys: Iterable[str]) -> tuple[Chart, ...]:
    """Return charts of what runs (by id) have logged, each value beside those of earlier runs of the project."""
    found = []
    for key in keys:
        record = _records[key]
        older = list(_records)[: list(_records).index(key)]
        before = [_records[old] for old in older if _projects[old] == _projects[key]][-_EARLIER_RUNS:]
        for name in record.columns:
            others = tuple(Curve(old.name, tuple(old.column(name))) for old in before if name in old.columns)
            found.append(Chart(curve=Curve(name, tuple(record.column(name))), earlier=others))
    return tuple(found[:_MOST_CHARTS])
