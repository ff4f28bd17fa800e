"""What the ranks have logged with ``accelerator.log``, over steps, and the losses of earlier runs of this kernel."""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING

from nb_accelerate.base.records import Curve
from nb_accelerate.notebook.display.rank_history import is_training_loss
from nb_accelerate.notebook.display.thinned_curve import ThinnedCurve

if TYPE_CHECKING:
    from nb_accelerate.base.progress_page import Sample
    from nb_accelerate.notebook.display.view import View

_EARLIER_RUNS = 3
"""Runs before that a chart shows."""

_FEW_POINTS = 8
"""Points of a run that is too short to be remembered."""

_earlier: list[tuple[str, Curve]] = []
"""The name of a run, without numbers, and its losses; in the order in which they ended."""


class LoggedValues:
    """Collects the values that a rank logs, as seen on its page: of several between two samples the last."""

    def __init__(self) -> None:
        self._histories: dict[str, ThinnedCurve] = {}
        self._last: dict[str, float] = {}

    def add(self, sample: Sample) -> None:
        """Take the newest sample of the rank."""
        for name, value in sample.scalars.items():
            if not math.isfinite(value) or self._last.get(name) == value or is_training_loss(name):
                continue
            self._last[name] = value
            self._histories.setdefault(name, ThinnedCurve()).add(sample.steps, value)

    @property
    def curves(self) -> tuple[Curve, ...]:
        """Return what was logged, by name, in the order in which it first came."""
        return tuple(Curve(name, history.points) for name, history in self._histories.items())


def remember(view: View) -> None:
    """Keep the losses of a run that has ended for the charts of later ones."""
    if len(view.curve) >= _FEW_POINTS:
        name = f"{view.facts.name}, {time.strftime('%H:%M:%S')}"
        _earlier.append((_kind(view.facts.name), Curve(name, view.curve)))


def earlier_runs(name: str) -> tuple[Curve, ...]:
    """Return the losses of the last few runs of a function or, for a cell, of other cells."""
    return tuple(curve for kind, curve in _earlier if kind == _kind(name))[-_EARLIER_RUNS:]


def _kind(name: str) -> str:
    return re.sub(r"\d+", "", name)
