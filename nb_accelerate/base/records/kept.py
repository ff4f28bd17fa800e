"""Runs of this kernel: what trackers of its ranks, or of this process, have told, and what panels have seen."""

from __future__ import annotations

import json
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.records.record import RunRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.base.records.curves import Points

_records: dict[str, RunRecord] = {}
"""By the id their trackers gave them, in the order in which they began."""


def runs() -> list[RunRecord]:
    """Return the runs of this notebook since its kernel started, the first one first.

    Shown in a cell, a run draws its curves; ``run.column("loss")`` has the values, ``run.config`` the settings.
    """
    return list(_records.values())


def take(data: bytes) -> str | None:
    """Note what a tracker has told of a run. Returns the run's id; None if it makes no sense."""
    try:
        entry: dict[str, Any] = json.loads(data)
        key, config = str(entry["run"]), dict(entry.get("config", {}))
    except (ValueError, KeyError, TypeError):
        return None
    record = _records.get(key)
    if record is None:
        record = _records[key] = RunRecord(name=_free_name(str(entry.get("name", "run"))), began=time.time())
    record.config.update(config)
    if isinstance(entry.get("row"), dict):
        record.add(entry["row"])
    if isinstance(entry.get("end"), str):
        record.end(entry["end"])
    return key


def note_run(
    name: str,
    *,
    config: Mapping[str, Any],
    values: Mapping[str, Points],
    began: float,
    ended: str,
    logged_as: Sequence[str] = (),
) -> None:
    """Note a run that has ended, for `runs` and for charts of later runs.

    Args:
        name: of the function or cell; a second run of the name gets a number.
        config: settings by which it can be told from others. What a tracker was given goes before.
        values: (step, value) by name, such as ``"loss"``, as far as they were seen from outside.
        began: `time.time` when it began.
        ended: ``"done"``, ``"interrupted"``, ``"stopped"``, or ``"failed: "`` and the name of the error.
        logged_as: ids of runs that trackers have told of meanwhile, see `take`: these are completed. Without any, one
            is added.
    """
    told = [_records[key] for key in logged_as]
    if not told:
        told = [RunRecord(name=_free_name(name), began=began)]
        _records[uuid.uuid4().hex] = told[0]
    for record in told:
        record.config.update({key: value for key, value in config.items() if key not in record.config})
        known = record.columns
        for metric, points in values.items():
            if metric not in known:
                for step, value in points:
                    record.add({"step": step, metric: value})
        if not record.ended:
            record.end(ended)


def record_of(key: str) -> RunRecord:
    """Return a run by its id."""
    return _records[key]


def earlier(key: str) -> list[RunRecord]:
    """Return the runs before one (by id) that are called alike but for numbers."""
    older = list(_records)[: list(_records).index(key)]
    return [_records[old] for old in older if kind_of(_records[old].name) == kind_of(_records[key].name)]


def kind_of(name: str) -> str:
    """Return the name of a run without numbers."""
    return re.sub(r"-?\d+", "", name)


def _free_name(name: str) -> str:
    names = {record.name for record in _records.values()}
    number, free = 1, name
    while free in names:
        number += 1
        free = f"{name}-{number}"
    return free
