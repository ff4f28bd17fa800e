"""Was it the out-of-memory killer? The system counts its victims; a count that rose says that it was at work."""

from __future__ import annotations

from pathlib import Path

HINT = (
    "The system's out-of-memory killer was at work meanwhile: the machine, or this container, is short of memory. "
    "Use smaller batches, fewer loader workers or fewer ranks."
)

_COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))


def oom_kills(counters: tuple[Path, ...] = _COUNTERS) -> int:
    """Processes the out-of-memory killer has ended since the system, or the container, started."""
    return sum(_count(path) for path in counters)


def _count(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # not Linux, or no such controller
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
