"""Runs as a table, and as one chart that compares them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Any, overload

from typing_extensions import override

from nb_accelerate.base.records.curves import Curve, is_wide, plotted
from nb_accelerate.base.records.naming import differing, labels, settings, shown
from nb_accelerate.base.records.record import better
from nb_accelerate.base.table import Table
from nb_accelerate.base.words import duration
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nb_accelerate.base.records.record import RunRecord

_MOST_VALUES = 4
"""Logged values with columns of their own."""

_COUNTERS = ("epoch", "step", "global_step")

_NONE = 'No runs yet. Those that log_with="jsonl" has written are read by runs(project_dir="the folder").'


@dataclass(frozen=True)
class _Column:
    title: str
    cells: tuple[str, ...]
    is_text: bool = False


class Runs(Sequence["RunRecord"]):
    """Runs, the newest last. A slice is again a table that can be drawn."""

    def __init__(self, runs: Iterable[RunRecord], problems: Iterable[str] = ()) -> None:
        self._runs = tuple(runs)
        self._problems = tuple(problems)

    @override
    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> RunRecord: ...

    @overload
    def __getitem__(self, index: slice) -> Runs: ...

    @override
    def __getitem__(self, index: int | slice) -> RunRecord | Runs:
        return Runs(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each run, for ``pandas.DataFrame``.

        Settings are called ``config.lr``, newest and best values ``loss`` and ``best loss``.
        """
        return [
            {
                "name": run.name,
                "began": datetime.fromtimestamp(run.began) if run.began else None,
                "duration": run.duration,
                "ended": run.ended,
                **{f"config.{name}": value for name, value in run.config.items()},
                **{name: run.last(name) for name in run.columns},
                **{f"best {name}": run.best(name) for name in run.columns if better(name)},
            }
            for run in self._runs
        ]

    def plot(self, name: str = "loss", *, log: bool | None = None) -> Any:
        """Draw one chart with a curve for each run, and return its axes (of matplotlib).

        Args:
            name: of the value.
            log: whether its scale is logarithmic. None is so if values differ by more than a factor of ten, and lower
                ones are better, if that is known.

        Raises:
            ConfigError: no run has values by that name.
            MissingDependencyError: matplotlib is not installed.
        """
        having = [run for run in self._runs if name in run.columns]
        if not having:
            if not self._runs:
                raise ConfigError(f"There are no runs to draw. {self!r}")
            known = dict.fromkeys(column for run in self._runs for column in run.columns)
            calls = ", ".join(f"plot({column!r})" for column in known)
            instead = f" Write {calls}." if known else " Nothing was."
            raise ConfigError(f"{name!r} was not logged in these runs.{instead}")
        said = labels([run.name for run in having], [run.config for run in having])
        curves = [Curve(label, tuple(run.column(name))) for label, run in zip(said, having, strict=True)]
        if log is None:
            log = better(name) != "highest" and is_wide(tuple(point for curve in curves for point in curve.points))
        return plotted(curves, name, log=log)

    def _repr_html_(self) -> str:
        return self._table._repr_html_() if self._runs else f"<p>{escape(repr(self))}</p>"

    @override
    def __repr__(self) -> str:
        return repr(self._table) if self._runs else " ".join(self._problems or (_NONE,))

    @property
    def _table(self) -> Table:
        columns = self._columns
        titles = [column.title for column in columns]
        right = [column.title for column in columns if not column.is_text]
        return Table(titles, list(zip(*(column.cells for column in columns), strict=True)), right, self._notes)

    @property
    def _columns(self) -> list[_Column]:
        runs = self._runs
        today = time.strftime("%d %b")
        begins = [time.localtime(run.began) if run.began else None for run in runs]
        of_today = all(began is None or time.strftime("%d %b", began) == today for began in begins)
        when = "%H:%M:%S" if of_today else "%d %b %H:%M"
        columns = [
            _text("", map(str, range(len(runs)))),
            _text("name", (run.name for run in runs)),
            _text("began", (time.strftime(when, began) if began else "" for began in begins)),
        ]
        for name in differing([run.config for run in runs]):
            cells = tuple(shown(run.config[name]) if name in run.config else "" for run in runs)
            columns.append(_Column(name, cells))
        for name in self._values[:_MOST_VALUES]:
            columns += _value_columns(name, runs)
        columns.append(_text("ended", (run.ended or "not yet" for run in runs)))
        columns.append(_Column("time", tuple("" if run.duration is None else duration(run.duration) for run in runs)))
        return columns

    @property
    def _values(self) -> list[str]:
        """Return the names of logged values that have columns, those first by which runs are compared.

        A value that is the same in all runs all the time, and one that a column of settings has, is none.
        """
        runs = self._runs
        names = dict.fromkeys(name for run in runs for name in run.columns)
        config = {name for run in runs for name in run.config}
        found = [name for name in names if name not in {*config, *_COUNTERS} and not _constant(name, runs)]
        return sorted(found, key=lambda name: not better(name))

    @property
    def _notes(self) -> list[str]:
        """Return sentences below the table: what is the same in all runs, and what it does not show."""
        runs = self._runs
        told = differing([run.config for run in runs])
        steady = {name: runs[0].last(name) for name in runs[0].columns if _constant(name, runs)}
        known = {name: value for name, value in (steady | runs[0].config).items() if value is not None}
        same = settings(known, (name for name in known if name not in {*told, *_COUNTERS}))
        rest = self._values[_MOST_VALUES:]
        notes = [f"{'The same in all' if len(runs) > 1 else 'With'}: {same}"] if same else []
        notes += [f"Also logged: {', '.join(rest)}"] if rest else []
        return [*notes, *self._problems]


def _text(title: str, cells: Iterable[str]) -> _Column:
    return _Column(title, tuple(cells), is_text=True)


def _value_columns(name: str, runs: Sequence[RunRecord]) -> list[_Column]:
    """Return the newest values, and the best if a run had a better one than its last."""
    last, best = [run.last(name) for run in runs], [run.best(name) for run in runs]
    found = [_Column(name, tuple(_figure(value) for value in last))]
    if last != best and better(name):
        found.append(_Column(f"{better(name)} {name}", tuple(_figure(value) for value in best)))
    return found


def _constant(name: str, runs: Sequence[RunRecord]) -> bool:
    """Return whether a value is the same all the time in all runs."""
    return all(run.is_constant(name) for run in runs) and len({run.last(name) for run in runs}) == 1


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
