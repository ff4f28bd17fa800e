"""A curve in as many points as a small picture has room for, however long the run is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nb_accelerate.base.records import Points

_MOST_POINTS = 240
"""Points, with the newest."""


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
