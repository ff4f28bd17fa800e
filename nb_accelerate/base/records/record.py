"""What the JSON lines tracker wrote, read back; shown in a notebook, it draws its curves."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.records.curves import Curve, Plot
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import os

_NOT_VALUES = ("step", "time")


_MOST_ROWS = 4001
"""Rows of the same names that are kept, at most: an odd number, so that the last one stays."""


@dataclass
class _Kind:
    """Rows of the same names: how many there were, of how many one is kept, and the newest if only as such."""

    seen: int = 0
    stride: int = 1
    passing: dict[str, Any] | None = None


@dataclass(kw_only=True)
class RunRecord:
    """One run.

    Attributes:
        name: of the run.
        config: its settings.
        rows: one dict for each call of ``log``, in order.
        began: `time.time` when it began; 0 if that is not known.
        ended: how: ``"done"``, ``"nan"`` (done, and its last loss was not finite), ``"interrupted"``, ``"stopped"``, or
            ``"failed: "`` and the name of the error. ``""`` while it is on, and of one whose end nobody has noted.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    began: float = 0.0
    ended: str = ""
    _until: float = field(default=0.0, repr=False)
    _kinds: dict[frozenset[str], _Kind] = field(default_factory=dict, repr=False)

    def add(self, row: dict[str, Any]) -> None:
        """Add what a call of ``log`` has logged. A row without a step gets its number as one.

        A run may go on for weeks. Of rows with the same names, when there are too many, every second one is dropped,
        and new ones are taken half as often; the first and the newest are always kept.
        """
        self.ended = ""  # it goes on, in another cell say
        row.setdefault("step", sum(kind.seen for kind in self._kinds.values()))
        kind = self._kinds.setdefault(frozenset(row), _Kind())
        if kind.passing is not None:
            newest = len(self.rows) - 1
            while self.rows[newest] is not kind.passing:
                newest -= 1
            del self.rows[newest]
        self.rows.append(row)
        kind.passing = row if kind.seen % kind.stride else None
        kind.seen += 1
        if kind.passing is None and (kind.seen - 1) // kind.stride + 1 == _MOST_ROWS:
            same = [other for other in self.rows if other.keys() == row.keys()]
            dropped = {id(other) for other in same[1::2]}
            self.rows[:] = [other for other in self.rows if id(other) not in dropped]
            kind.stride *= 2

    def end(self, how: str, at: float = 0.0) -> None:
        """Note how it ended, see `ended`, and when (`time.time`; 0 is now)."""
        losses = [value for _, value in self.column("loss")]
        self.ended = "nan" if how == "done" and losses and not math.isfinite(losses[-1]) else how
        self._until = at or time.time()

    @property
    def duration(self) -> float | None:
        """Return seconds from its begin to its end, or to the newest row while it has none; None if not known."""
        until = self._until if self.ended else max((row.get("time", 0.0) for row in self.rows[-1:]), default=0.0)
        return max(0.0, until - self.began) if self.began and until else None

    @property
    def columns(self) -> list[str]:
        """Return the names of all numbers that were logged, in the order in which they first came."""
        names: dict[str, None] = {}
        for row in self.rows:
            names.update(dict.fromkeys(name for name, value in row.items() if _is_number(value)))
        return [name for name in names if name not in _NOT_VALUES]

    def column(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) for every row that has a value; rows without a step are counted instead."""
        return [(row.get("step", index), row[name]) for index, row in enumerate(self.rows) if _is_number(row.get(name))]

    def plot(self, *names: str) -> Plot:
        """Return the curves of some values; in a notebook they are drawn.

        Args:
            *names: which; all by default.

        Raises:
            ConfigError: nothing was logged under a name.
        """
        known = self.columns
        for name in names:
            if name not in known:
                raise ConfigError(f"{name!r} was not logged in {self.name}. Write one of: {', '.join(known)}.")
        chosen = names or tuple(known)
        return Plot(title=self.name, curves=tuple(Curve(name, tuple(self.column(name))) for name in chosen))

    def _repr_html_(self) -> str:
        return self.plot()._repr_html_()

    def __repr__(self) -> str:
        return f"RunRecord({self.name!r}, {len(self.rows)} rows of {', '.join(self.columns) or 'nothing'})"


def read_run(path: str | os.PathLike[str]) -> RunRecord:
    """Read what the JSON lines tracker wrote, also while it is being written.

    Args:
        path: the file, or a folder whose newest run is meant.

    Raises:
        FileNotFoundError: there is no such file, or no run in the folder.
        ConfigError: a line is not JSON.
    """
    file = Path(path)
    if file.is_dir():
        runs = sorted(file.glob("*.jsonl"), key=lambda run: run.stat().st_mtime_ns)
        if not runs:
            raise FileNotFoundError(f"There is no run (*.jsonl) in {file}.")
        file = runs[-1]
    config: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break  # it is being written
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"Line {number} of {file} is not JSON: {line[:60]!r}. Is it the file of a run?"
            ) from error
        if entry.keys() == {"config"}:
            config.update(entry["config"])
        else:
            rows.append(entry)
    return RunRecord(name=file.stem, config=config, rows=rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
