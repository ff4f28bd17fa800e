"""Memory and processors of the host, as far as this process may have them."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")  # where a container sees its own limits, with version 2 of control groups


def num_cpus() -> int:
    """Return how many cores this process may use: a container or a batch system may lend it fewer than there are."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # macOS has none, and a sandbox may refuse it
        return os.cpu_count() or 1


def memory_used() -> int:
    """Return the bytes of main memory that this process holds (RSS); 0 if the system does not say."""
    import psutil

    try:
        return int(psutil.Process().memory_info().rss)
    except psutil.Error:  # no /proc
        return 0


def memory_peak() -> int:
    """Return the most bytes of main memory that this process held at a time; 0 if the system does not say."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_left(ranks: int) -> int:
    """Return the bytes that this process, one of so many ranks of the machine, could have in addition; 0 if unknown."""
    import psutil

    with contextlib.suppress(OSError, psutil.Error):  # no /proc
        free = psutil.virtual_memory().available
        in_container = _left_in_container(_CGROUP)
        left = (free if in_container is None else min(free, in_container)) // max(1, ranks)
        of_process = _left_of_process()
        return int(left if of_process is None else min(left, of_process))
    return 0


def _left_in_container(folder: Path) -> int | None:
    try:
        most = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # Pages of files are given up when memory is needed.
    return None if most == "max" else max(0, int(most) - used + int(cached.get("inactive_file", 0)))


def _left_of_process() -> int | None:
    import resource

    import psutil

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else max(0, soft - int(psutil.Process().memory_info().vms))
