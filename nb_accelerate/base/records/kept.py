"""Runs of this kernel: what trackers of its ranks, or of this process, have told, and what panels have seen."""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.records.files import read_folder, write_end, write_lines
from nb_accelerate.base.records.record import RunRecord
from nb_accelerate.base.records.table import Runs

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from nb_accelerate.base.records.curves import Points

records: dict[str, RunRecord] = {}  # by the id their trackers gave them, in the order in which they began


def runs(name: str = "", *, project_dir: str | os.PathLike[str] | None = None) -> Runs:
    """Return the runs of this notebook, the newest last: a table in a cell, and a sequence.

    A run is a call of `notebook_launcher` or a ``%%distributed`` cell in which a loss was seen or values were logged,
    or what `Accelerator.init_trackers` opens with ``log_with="notebook"`` or ``"jsonl"``. The first is in memory only.
    Files of ``"jsonl"`` stay: those in the folder of a run of this notebook are in the table, of scripts too.

    Examples:
        ```python
        runs()                       # a table
        runs().plot("loss")          # one chart of all
        runs("digits")[-3:].plot()   # of the last three that are called so
        runs()[-1].config            # settings of the newest; .column("loss") has its values
        runs(project_dir="runs")     # files of an earlier session
        pd.DataFrame(runs().records())
        ```

    Args:
        name: of runs; numbers at its end need not be given. "" is all.
        project_dir: a folder with files of the JSON lines tracker, read as well.
    """
    folders = {Path(project_dir): None} if project_dir is not None else {}
    kept = list(records.values())
    folders |= {Path(record.file).parent: None for record in kept if record.file}
    files: dict[str, RunRecord] = {}
    problems: list[str] = []
    for folder in folders:
        read, unreadable = read_folder(folder)
        files |= {record.file: record for record in read if record.file not in files}
        problems += unreadable
        if project_dir is not None and folder == Path(project_dir) and not read:
            problems.append(f"No runs in {folder}." if folder.is_dir() else f"There is no folder {folder.absolute()}.")
    for record in kept:
        if record.file in files:  # a loss that was only seen is in memory, and not in the file
            seen = {column: tuple(record.column(column)) for column in record.columns}
            files[record.file].complete({}, seen, record.ended)
    chosen = [*files.values(), *(record for record in kept if record.file not in files)]
    if name:
        others = dict.fromkeys(re.sub(r"-\d+$", "", record.name) for record in chosen)
        chosen = [record for record in chosen if re.fullmatch(re.escape(name) + r"(-\d+)?", record.name)]
        if others and not chosen:
            problems.append(f"No run is called {name!r}. There are: {', '.join(others)}.")
    return Runs(sorted(chosen, key=lambda record: record.began), dict.fromkeys(problems))


def take(data: bytes) -> str | None:
    """Note what a tracker has told of a run. Returns the run's id; None if it makes no sense."""
    try:
        entry: dict[str, Any] = json.loads(data)
        key, config = str(entry["run"]), dict(entry.get("config", {}))
    except (ValueError, KeyError, TypeError):
        return None
    record = records.get(key)
    if record is None:
        record = records[key] = RunRecord(name=_free_name(str(entry.get("name", "run"))), began=time.time())
    record.file = str(entry.get("file", record.file))
    record.config = {**record.config, **config}  # another thread may read it
    record.ended = ""
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
        config: settings by which it can be told from others. What a tracker was given goes before.
        values: (step, value) by name, such as ``"loss"``, as far as they were seen from outside.
        ended: see `RunRecord`.
        logged_as: ids of runs that trackers have told of meanwhile: these are completed. Without any, one is added.
    """
    told = [records[key] for key in logged_as]
    if not told:
        told = [RunRecord(name=_free_name(name), began=began)]
        records[uuid.uuid4().hex] = told[0]
    for record in told:
        if Path(record.file).is_file():
            added = {key: value for key, value in config.items() if key not in record.config}
            with contextlib.suppress(OSError):  # the disk is full: it stays a run whose end nobody has noted
                write_lines(record.file, *([{"config": added}] if added else ()))
                if not record.ended:
                    write_end(record.file, ended)
        record.complete(dict(config), values if len(told) == 1 else {}, ended)


def record_of(key: str) -> RunRecord:
    """Return a run by its id."""
    return records[key]


def earlier(key: str) -> list[RunRecord]:
    """Return the runs before one (by id) that are called alike but for numbers."""
    older = list(records)[: list(records).index(key)]
    return [records[old] for old in older if kind_of(records[old].name) == kind_of(records[key].name)]


def kind_of(name: str) -> str:
    """Return the name of a run without numbers."""
    return re.sub(r"-?\d+", "", name)


def _free_name(name: str) -> str:
    names = {record.name for record in list(records.values())}
    number, free = 1, name
    while free in names:
        number += 1
        free = f"{name}-{number}"
    return free
