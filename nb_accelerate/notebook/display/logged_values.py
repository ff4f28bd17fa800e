"""What the ranks have logged with ``accelerator.log``, over steps, and the losses of earlier runs of this kernel."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.records import Curve
from nb_accelerate.base.records.kept import earlier, kind_of, note_run, record_of
from nb_accelerate.base.records.naming import differing, labels, settings
from nb_accelerate.base.records.record import is_training_loss
from nb_accelerate.notebook.display.view import Chart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nb_accelerate.base.progress_page import Sample
    from nb_accelerate.base.records import Points
    from nb_accelerate.notebook.display.view import View

_EARLIER_RUNS = 3  # runs before that a chart shows
_FEW_POINTS = 8  # points of a run that is too short to be remembered
_MOST_POINTS = 240  # points of a curve, however long the run is

# The name of a run, without numbers, its settings and losses; of the last runs, in the order in which they ended.
_earlier: deque[tuple[str, Mapping[str, Any], Curve]] = deque(maxlen=100)


class ThinnedCurve:
    """A value over steps. The first and the newest point are always kept.

    When there are too many points, every second one is dropped and new ones are taken half as often.
    """

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._newest: tuple[float, float] | None = None
        self._stride = 1
        self._skipped = 0

    @property
    def points(self) -> Points:
        """Return (step, value), in order of steps."""
        return (*self._points, self._newest) if self._newest is not None else tuple(self._points)

    def add(self, step: float, value: float) -> None:
        """Add a point. It replaces the last one if that is of the same step; one of an earlier step is left out."""
        point = (float(step), value)
        last = self._newest or (self._points[-1] if self._points else None)
        if last is not None and point[0] <= last[0]:
            if point[0] == last[0] and self._newest is not None:
                self._newest = point
            elif point[0] == last[0]:
                self._points[-1] = point
            return
        self._skipped += 1
        if self._skipped < self._stride:
            self._newest = point
            return
        self._skipped, self._newest = 0, None
        self._points.append(point)
        if len(self._points) == _MOST_POINTS - 1:  # an odd number: the last one stays
            del self._points[1::2]
            self._stride *= 2


class LoggedValues:
    """Collects the values that a rank logs, as seen on its page: of several between two samples the last."""

    def __init__(self) -> None:
        self._histories: dict[str, ThinnedCurve] = {}
        self._last: dict[str, float] = {}

    def add(self, sample: Sample, step: int) -> None:
        """Take the newest sample of the rank, which is at a step of the run."""
        for name, value in sample.scalars.items():
            if not math.isfinite(value) or self._last.get(name) == value or is_training_loss(name):
                continue
            self._last[name] = value
            self._histories.setdefault(name, ThinnedCurve()).add(step, value)

    @property
    def curves(self) -> tuple[Curve, ...]:
        """Return what was logged, by name, in the order in which it first came."""
        return tuple(Curve(name, history.points) for name, history in self._histories.items())


def remember(view: View, config: Mapping[str, Any], seconds: float, logged_as: Sequence[str] = ()) -> None:
    """Keep a run that has ended: for `nb_accelerate.runs`, and its losses for the charts of later ones."""
    name = view.facts.name
    values = {curve.name: curve.points for curve in (Curve("loss", view.curve), *view.logged) if curve.points}
    if values or logged_as:
        failure = f": {view.failure.what}" if view.failure and view.failure.what else ""
        began = time.time() - seconds
        note_run(name, config=config, values=values, began=began, ended=view.state + failure, logged_as=logged_as)
    if len(view.curve) >= _FEW_POINTS:
        _earlier.append((kind_of(name), dict(config), Curve(f"{name}, {time.strftime('%H:%M:%S')}", view.curve)))


def earlier_runs(name: str, config: Mapping[str, Any]) -> tuple[str, tuple[Curve, ...]]:
    """Return the losses of the last few runs of a function or, for a cell, of other cells.

    They are called by the settings in which they and this run differ, by name and time if there are none.

    Returns:
        What this run would be called, or "", and the losses.
    """
    runs = [(run_config, curve) for kind, run_config, curve in _earlier if kind == kind_of(name)][-_EARLIER_RUNS:]
    configs = [*(run_config for run_config, _ in runs), config]
    run_label = settings(config, differing(configs))
    run_names = labels([*(curve.name for _, curve in runs), ""], configs)
    return run_label, tuple(Curve(label, curve.points) for label, (_, curve) in zip(run_names, runs, strict=False))


_MOST_CHARTS = 8  # Charts in a panel; `runs` has the rest.


def charts_of(keys: Iterable[str], config: Mapping[str, Any] | None = None) -> tuple[Chart, ...]:
    """Return charts of what runs (by id) have logged, each value beside those of earlier runs of the name."""
    charts = []
    for key in keys:
        record = record_of(key)
        if record.file:
            continue  # `runs` draws what is in a file
        earlier_records = earlier(key)[-_EARLIER_RUNS:]
        run_names = labels(
            [run.name for run in (*earlier_records, record)],
            [*(run.config for run in earlier_records), {**(config or {}), **record.config}],
        )
        for name in record.columns:
            earlier_curves = tuple(
                Curve(label, tuple(old.column(name)))
                for label, old in zip(run_names, earlier_records, strict=False)
                if name in old.columns
            )
            charts.append(Chart(curve=Curve(name, tuple(record.column(name))), earlier=earlier_curves))
    return tuple(charts[:_MOST_CHARTS])


def config_of(view: View, keys: Iterable[str]) -> dict[str, Any]:
    """Return the settings of what ranks run: the trackers' config, the function's arguments, the ranks' own."""
    config = {**view.settings, **view.facts.config}
    for key in keys:
        config |= record_of(key).config
    return config
