"""Timing several things in turns, so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Seconds = dict[str, float]


def medians(actions: Mapping[str, Callable[[], object]], *, rounds: int) -> Seconds:
    """The median seconds of each action, by name."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def ratios(seconds: Seconds, *, base: str) -> list[str]:
    """A line for each action: how many times the base it took."""
    width = max(map(len, seconds))
    return [f"{name:<{width}}  {value / seconds[base]:6.2f} x  ({value:.3f} s)" for name, value in seconds.items()]
