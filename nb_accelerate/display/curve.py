"""The loss over steps, in as many points as a small picture has room for."""

from __future__ import annotations

_MOST = 240
"""Points, with the newest."""


class Curve:
    """Points of a curve. When there are too many, every second one goes, and new ones come half as often.

    The first and the newest are always there.
    """

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._newest: tuple[float, float] | None = None
        self._stride = 1
        self._skipped = 0

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(step, mean over ranks), in order."""
        return (*self._points, self._newest) if self._newest is not None else tuple(self._points)

    def add(self, sampled: tuple[int, list[float]] | None) -> None:
        """Take the losses that the ranks have at a step; nothing if it was there already."""
        if sampled is None:
            return
        step, losses = sampled
        point = (float(step), sum(losses) / len(losses))
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
        if len(self._points) == _MOST - 1:  # an odd number: the last one stays
            del self._points[1::2]
            self._stride *= 2
