"""Files of the JSON lines tracker: one for each run, whose lines say what it is, its settings, values and end.

::

    {"run": {"began": 1764167700.1, "version": 1}}
    {"config": {"lr": 0.1}}
    {"step": 1, "time": 1764167702.3, "loss": 2.3}
    {"end": {"how": "done", "time": 1764167709.8}}

Files of earlier versions have no first and no last line.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.records.record import RunRecord, number
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import os

_VERSION = 1

_LATEST = 1e11  # a time that is later, in seconds since 1970, is none: other functions than ours cannot show it
_FIRST = 1 << 16  # bytes of a first line that are read to see whether it is the file of a run


def first_line() -> dict[str, Any]:
    """Return the line with which the file of a run begins that begins now."""
    return {"run": {"began": time.time(), "version": _VERSION}}


def write_end(file: str | os.PathLike[str], how: str) -> None:
    write_lines(file, {"end": {"how": how, "time": round(time.time(), 3)}})


def write_lines(file: str | os.PathLike[str], *lines: dict[str, Any]) -> None:
    """Add lines to a file. It is opened for them: nothing is open, or lost, when the process is killed."""
    text = (
        json.dumps(line, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
        for line in lines
    )
    with Path(file).open("a", encoding="utf-8") as opened:
        opened.write("".join(f"{line}\n" for line in text))


def read_run(path: str | os.PathLike[str]) -> RunRecord:
    """Read what the JSON lines tracker wrote, also while it is being written.

    Args:
        path: the file, or a folder whose newest run is meant.

    Raises:
        FileNotFoundError: there is no such file, or no run in the folder.
        ConfigError: a line is not the record of a run.
    """
    file = Path(path)
    if file.is_dir():
        runs = sorted(file.glob("*.jsonl"), key=lambda run: run.stat().st_mtime_ns)
        if not runs:
            raise FileNotFoundError(f"There is no run (*.jsonl) in {file}.")
        file = runs[-1]
    record, damage = _read(file)
    if damage:
        raise ConfigError(f"{damage} Is it the file of a run?")
    return record


def read_folder(folder: Path) -> tuple[list[RunRecord], list[str]]:
    """Return the runs in a folder and in those just below it, and sentences about what cannot be read."""
    records, problems = [], []
    for file in sorted({*folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")}):
        try:
            if not _is_run(file):
                continue
            record, damage = _read(file)
        except OSError as error:
            problems.append(f"{file} cannot be read: {error.strerror}.")
            continue
        record.name = file.relative_to(folder).with_suffix("").as_posix()
        records.append(record)
        if damage:
            problems.append(f"{damage} What is above it is shown.")
    return records, problems


def _read(file: Path) -> tuple[RunRecord, str]:
    """Return a run, and a sentence about a line at which reading has ended because of it."""
    record, damage = RunRecord(name=file.stem, file=str(file.resolve())), ""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for at, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                break  # it is being written
            try:
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise TypeError
            except (ValueError, TypeError, RecursionError):
                damage = f"Line {at} of {file} is not that of a run: {line[:60]!r}."
                break
            record.read(entry)
    times = (record.began, *(number(row, "time", 0.0) for row in record.rows[:1]), file.stat().st_mtime)
    record.began = next((time for time in times if 0 < time < _LATEST), 0.0)
    return record, damage


def _is_run(file: Path) -> bool:
    """Return whether a file is one of a run, by its first line: data sets are files of JSON lines too."""
    if not file.is_file():  # a pipe would be waited for
        return False
    with file.open("rb") as opened:
        line = opened.readline(_FIRST)
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and (entry.keys() in ({"run"}, {"config"}) or {"time", "step"} <= entry.keys())
