"""How much ranks use of their devices and of the CPU, in words."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from nb_accelerate.notebook.display import words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nb_accelerate.notebook.display.seen import Seen
    from nb_accelerate.notebook.display.track import Track


def of_gpu(ranks: Iterable[tuple[Track, Seen]], *, moved_since: float) -> str:
    """Return the median utilisation at the last steps; "" if none is known, "-" if no rank takes steps at the moment.

    Args:
        ranks: each as a panel follows it and as it was seen last.
        moved_since: `time.monotonic`; a rank that has not moved since takes no steps.
    """
    known = [(track, seen) for track, seen in ranks if track.sample.utilisation is not None]
    values = [
        track.sample.utilisation or 0
        for track, seen in known
        if seen.state == "running" and not track.sample.evaluates and track.moved_at >= moved_since
    ]
    return words.percent(median(values)) if values else "-" if known else ""


def of_cpu(ranks: Iterable[Seen]) -> str:
    """Return the median CPU use of the processes; "" where the device reports its own memory or utilisation."""
    values = [
        seen.cpu
        for seen in ranks
        if seen.cpu is not None and seen.state in ("starting", "running", "stopped")
        if not seen.sample.memory and seen.sample.utilisation is None
    ]
    return words.percent(median(values)) if values else ""
