"""Runs as a table, and as one chart that compares them."""

from __future__ import annotations

import time
from collections.abc import Sequence
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

_MOST_VALUES = 4  # logged values with columns of their own

_COUNTERS = ("epoch", "step", "global_step")

_NONE = 'No runs yet. Those that log_with="jsonl" has written are read by runs(project_dir="the folder").'


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
            columns = dict.fromkeys(column for run in self._runs for column in run.columns)
            calls = ", ".join(f"plot({column!r})" for column in columns)
            instead = f" Write {calls}." if columns else " Nothing was."
            raise ConfigError(f"{name!r} was not logged in these runs.{instead}")
        names = labels([run.name for run in having], [run.config for run in having])
        curves = [Curve(label, tuple(run.column(name))) for label, run in zip(names, having, strict=True)]
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
        runs = self._runs
        configs = [run.config for run in runs]
        today = time.strftime("%d %b")
        begins = [time.strftime("%d %b %H:%M:%S", time.localtime(run.began)) if run.began else "" for run in runs]
        columns: dict[str, Sequence[str]] = {
            "": [*map(str, range(len(runs)))],
            "name": [run.name for run in runs],
            "began": [began.removeprefix(f"{today} ") for began in begins],
        }
        left = [*columns, "ended"]
        told = differing(configs)
        columns |= {name: [shown(config[name]) if name in config else "" for config in configs] for name in told}
        # Values by which runs are compared come first. What never changes is said below.
        names = dict.fromkeys(name for run in runs for name in run.columns)
        constant = [
            name
            for name in names
            if all(run.is_constant(name) for run in runs) and len({run.last(name) for run in runs}) == 1
        ]
        config_names = {name for config in configs for name in config}
        values = [name for name in names if name not in {*config_names, *_COUNTERS, *constant}]
        values.sort(key=lambda name: not better(name))
        for name in values[:_MOST_VALUES]:
            last, best = [run.last(name) for run in runs], [run.best(name) for run in runs]
            columns[name] = [*map(_figure, last)]
            if last != best and better(name):
                columns[f"{better(name)} {name}"] = [*map(_figure, best)]
        columns["ended"] = [run.ended or "not yet" for run in runs]
        columns["time"] = ["" if run.duration is None else duration(run.duration) for run in runs]
        known = {name: runs[0].last(name) for name in constant} | runs[0].config
        same = settings(known, (name for name in known if name not in {*told, *_COUNTERS}))
        notes = [f"{'The same in all' if len(runs) > 1 else 'With'}: {same}"] if same else []
        if values[_MOST_VALUES:]:
            notes.append(f"Also logged: {', '.join(values[_MOST_VALUES:])}")
        rows = list(zip(*columns.values(), strict=True))
        return Table([*columns], rows, [title for title in columns if title not in left], [*notes, *self._problems])


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
