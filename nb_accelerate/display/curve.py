"""The loss over steps, in as many points as a small picture has room for."""

from __future__ import annotations

_MOST = 240


class Curve:
    """Points of a curve. When there are too many, every second one goes, and new ones come half as often."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._stride = 1
        self._skipped = 0

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(step, mean over ranks), in order."""
        return tuple(self._points)

    def add(self, sampled: tuple[int, list[float]] | None) -> None:
        """Take the losses that the ranks have at a step; nothing if it was there already."""
        if sampled is None:
            return
        step, losses = sampled
        point = (float(step), sum(losses) / len(losses))
        if self._points and (point[0] < self._points[-1][0] or point == self._points[-1]):
            return
        if self._points and point[0] == self._points[-1][0]:
            self._points[-1] = point
            return
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        self._points.append(point)
        if len(self._points) > _MOST:
            del self._points[1::2]
            self._stride *= 2
