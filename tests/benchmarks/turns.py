"""Timing several things in turns, so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Seconds = dict[str, float]


def medians(actions: Mapping[str, Callable[[], object]], *, rounds: int, pause: float = 0.0) -> Seconds:
    """The median seconds of each action, by name.

    Args:
        actions: what is timed, in turns.
        rounds: how often.
        pause: seconds before each, for what the one before does in the background when it has returned.
    """
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            time.sleep(pause)
            began = time.perf_counter()
            action()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def ratios(seconds: Seconds, *, base: str) -> list[str]:
    """A line for each action: how many times the base it took."""
    width = max(map(len, seconds))
    return [f"{name:<{width}}  {value / seconds[base]:6.2f} x  ({value:.3f} s)" for name, value in seconds.items()]


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of two sums over the same rounds, and where it lies nineteen times of twenty: low, ratio, high.

    The interval is that of the bootstrap, over rounds (Efron and Tibshirani, An Introduction to the Bootstrap, 1993).
    """
    rounds = list(zip(above, below, strict=True))
    chance = random.Random(0)
    found = sorted(_ratio(chance.choices(rounds, k=len(rounds))) for _ in range(2000))
    return found[50], _ratio(rounds), found[-51]


def _ratio(rounds: Sequence[tuple[float, float]]) -> float:
    return sum(a for a, _ in rounds) / sum(b for _, b in rounds)


def pin() -> None:
    """Keep this rank on one core: moving between them costs CPU time, sometimes one loop's and sometimes another's."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
