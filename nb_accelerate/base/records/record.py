"""A run: its settings, what it has logged, how it ended. Shown in a notebook, it draws its curves."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.records.curves import Curve, plotted
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.base.records.curves import Points

_NOT_VALUES = ("step", "time")

_LOWER_IS_BETTER = {"error", "perplexity", "ppl", "mae", "mse", "rmse", "wer", "cer", "nll", "fid"}
_HIGHER_IS_BETTER = {"accuracy", "acc", "f1", "auc", "precision", "recall", "score", "bleu", "iou", "reward"}

_HUGE = 10**300  # integers that are greater are not shown: they may be no `float`
_MOST_ROWS = 4001  # rows of the same names that are kept, at most: an odd number, so that the last one stays


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
        file: that the JSON lines tracker has written; "" if there is none.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    began: float = 0.0
    ended: str = ""
    file: str = ""
    _until: float = field(default=0.0, repr=False)
    _extremes: dict[str, tuple[float, float]] = field(default_factory=dict, repr=False)
    # Of how many rows of the same names one is kept, and how many there were.
    _strides: dict[frozenset[str], list[int]] = field(default_factory=dict, repr=False)

    def read(self, line: dict[str, Any]) -> None:
        """Take a line of a file of the JSON lines tracker. Rows stay as they are, and all of them."""
        if line.keys() == {"run"} and isinstance(line["run"], dict):
            self.began = number(line["run"], "began", 0.0)
        elif line.keys() == {"config"} and isinstance(line["config"], dict):
            self.config = {**line["config"], **self.config}  # first what a tracker was given, then arguments
        elif line.keys() == {"end"} and isinstance(line["end"], dict):
            self.end(str(line["end"].get("how", "done")), number(line["end"], "time", 0.0))
        else:
            self.ended = ""
            self._note(line)
            self.rows.append(line)

    def __post_init__(self) -> None:
        for row in self.rows:
            self._note(row)

    def _note(self, row: dict[str, Any]) -> None:
        """Note the names of all numbers that are logged, and the least and the greatest of each that are finite."""
        for name, value in row.items():
            if _is_number(value) and name not in _NOT_VALUES:
                low, high = self._extremes.setdefault(name, (math.inf, -math.inf))
                if math.isfinite(value):
                    self._extremes[name] = min(low, value), max(high, value)

    def add(self, row: dict[str, Any]) -> None:
        """Add what a call of ``log`` has logged. A row without a step gets its number as one."""
        # A run may go on for weeks. Of rows with the same names, when there are too many, every second one is dropped,
        # and new ones are taken half as often; the first and the newest are always kept.
        self.ended = ""  # it goes on, in another cell say
        self._note(row)
        row.setdefault("step", sum(seen for _, seen in self._strides.values()))
        kind = self._strides.setdefault(frozenset(row), [1, 0])
        stride, seen = kind
        if (seen - 1) % stride:  # the one before was kept as the newest only
            del self.rows[next(at for at in reversed(range(len(self.rows))) if self.rows[at].keys() == row.keys())]
        self.rows.append(row)
        kind[1] += 1
        if seen % stride == 0 and seen // stride + 1 == _MOST_ROWS:
            same = [other for other in self.rows if other.keys() == row.keys()]
            dropped = {id(other) for other in same[1::2]}
            self.rows[:] = [other for other in self.rows if id(other) not in dropped]
            kind[0] *= 2

    def end(self, how: str, at: float = 0.0) -> None:
        """Note how it ended, see `ended`, and when (`time.time`; 0 is now)."""
        losses = [self.last(name) for name in self.columns if is_training_loss(name)]
        self.ended = "nan" if how == "done" and any(not math.isfinite(loss or 0.0) for loss in losses) else how
        self._until = at or time.time()

    def complete(self, config: dict[str, Any], values: Mapping[str, Points], ended: str) -> None:
        """Add what was known from outside when it had ended: what it did not tell itself."""
        how, at = (self.ended, self._until) if self.ended else (ended, 0.0)
        self.config = {**config, **self.config}
        has_loss = any(map(is_training_loss, self.columns))
        for name, points in values.items():
            if not (name in self._extremes or (has_loss and is_training_loss(name))):
                for step, value in points:
                    self.add({"step": step, name: value})
        self.end(how, at)

    @property
    def duration(self) -> float | None:
        """Return seconds from its begin to its end, or to the newest row while it has none; None if not known."""
        until = self._until if self.ended else number(self.rows[-1] if self.rows else {}, "time", 0.0)
        return max(0.0, until - self.began) if self.began and until else None

    @property
    def columns(self) -> list[str]:
        """Return the names of all numbers that were logged, in the order in which they first came."""
        return list(self._extremes)

    def column(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) for every row that has a value; rows without a step are counted instead."""
        having = ((index, row) for index, row in enumerate(self.rows) if _is_number(row.get(name)))
        return [(number(row, "step", index), row[name]) for index, row in having]

    def last(self, name: str) -> float | None:
        """Return the newest value; None if there is none."""
        return next((row[name] for row in reversed(self.rows) if _is_number(row.get(name))), None)

    def best(self, name: str) -> float | None:
        """Return the lowest loss or error, the highest accuracy or score; None of what is neither by its name."""
        low, high = self._extremes.get(name, (math.inf, -math.inf))
        return {"lowest": low, "highest": high}.get(better(name)) if low <= high else None

    def is_constant(self, name: str) -> bool:
        low, high = self._extremes.get(name, (math.inf, -math.inf))
        return low == high

    def plot(self, *names: str) -> Any:
        """Draw the curves of some values in one chart, and return its axes (of matplotlib).

        Args:
            *names: which; all by default.

        Raises:
            ConfigError: nothing was logged under a name.
            MissingDependencyError: matplotlib is not installed.
        """
        columns = self.columns
        for name in names:
            if name not in columns:
                raise ConfigError(f"{name!r} was not logged in {self.name}. Write one of: {', '.join(columns)}.")
        return plotted([Curve(name, tuple(self.column(name))) for name in names or columns], self.name)

    def __repr__(self) -> str:
        return f"RunRecord({self.name!r}, {len(self.rows)} rows of {', '.join(self.columns) or 'nothing'})"


@lru_cache(maxsize=256)
def is_training_loss(name: str) -> bool:
    return name.rpartition("/")[2].lower() in ("loss", "train_loss", "training_loss")


def better(name: str) -> str:
    """Return whether of a value by that name the ``"lowest"`` or the ``"highest"`` is best; "" if it does not say."""
    parts = set(re.split(r"[^a-z0-9]+", name.lower()))
    if "loss" in name.lower() or parts & _LOWER_IS_BETTER:
        return "lowest"
    return "highest" if parts & _HIGHER_IS_BETTER else ""


def number(row: dict[str, Any], name: str, default: float) -> float:
    """Return a finite number of a row; the default if there is something else, or nothing."""
    value: Any = row.get(name)
    return value if _is_number(value) and math.isfinite(value) else default


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < _HUGE
    return isinstance(value, float)
