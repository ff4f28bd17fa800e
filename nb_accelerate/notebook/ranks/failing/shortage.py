"""Find out whether memory did not suffice, and say what ranks held of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.errors.out_of_memory import bytes_wanted, says_out_of_memory
from nb_accelerate.notebook.display.memory import shortage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.protocol.messages import ErrorReport
    from nb_accelerate.notebook.ranks.proxy import RankProxy

_OOM_KILLS = re.compile(rb"^oom_kill (\d+)", re.MULTILINE)
_OOM_COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))


def oom_kills(counters: tuple[Path, ...] = _OOM_COUNTERS) -> int:
    """Return how many processes the out-of-memory killer has killed since the system, or the container, started."""
    return sum(_count(path) for path in counters)


def _count(path: Path) -> int:
    try:
        found = _OOM_KILLS.search(path.read_bytes())
    except OSError:  # not Linux, or no such controller
        return 0
    return int(found[1]) if found else 0


def shortage_on(rank: RankProxy, ranks: Sequence[RankProxy], report: ErrorReport | None = None) -> str:
    """Return who held what, and what to turn on; "" if memory did suffice, or no rank has prepared a model.

    Args:
        ranks: all of them. Their progress pages are read, so this is for the loop's thread.
    """
    if report is not None and not says_out_of_memory(report.type_name, report.message):
        return ""
    wanted = 0 if report is None else bytes_wanted(report.message)
    return shortage({other.rank: other.handle.page.read() for other in ranks}, failed=rank.rank, wanted=wanted)
