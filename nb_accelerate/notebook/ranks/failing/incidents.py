"""What can go wrong in a request, as data; which of it is the cause; and how errors about it are phrased."""

from __future__ import annotations

import contextlib
import enum
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.errors import LaunchError, StartError
from nb_accelerate.errors.out_of_memory import bytes_wanted, says_out_of_memory
from nb_accelerate.notebook.display.memory import shortage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nb_accelerate.notebook.protocol.messages import ErrorReport, Failure, Result
    from nb_accelerate.notebook.ranks.proxy import RankProxy

    Answer = tuple[Result | Failure, tuple[int, ...]]  # what a rank has answered, and the descriptors that came with it

INTERRUPTED, STOPPED = "interrupted", "stopped"  # See ``how`` of `Incident`. Stopped: all ranks were to end at once.


class IncidentKind(enum.Enum):
    """What can go wrong in a request."""

    FAILED = "a rank answered with an exception"
    DIED = "a rank has ended, or is of no use any more"
    UNASKED = "a message could not be sent to a rank"
    NOT_STARTED = "ranks were not ready in time"
    LATE = "ranks have not answered in time"
    INTERRUPTED = "the user has interrupted"
    ABANDONED = "ranks cannot go on because of something outside them"


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One thing that went wrong in a request."""

    kind: IncidentKind
    when: float  # `time.monotonic` at which it happened or was noticed
    rank: RankProxy | None = None  # the rank that it happened on; None if it concerns several
    failure: tuple[Failure, tuple[int, ...]] | None = None  # with `FAILED`, the answer
    error: BaseException | None = None  # with `UNASKED` and `ABANDONED`, why
    tail: str = ""  # the last output of the rank
    late: tuple[int, ...] = ()  # with ``NOT_STARTED`` and ``LATE``, the ranks that were not ready or had not answered
    how: str = ""  # with ``INTERRUPTED``, what the user did, as a participle; with ``NOT_STARTED``, where ranks were
    is_consequence: bool = False  # whether ranks had been signalled before
    out_of_memory: bool = False  # whether the system's killer has killed a process since the request began
    memory: str = ""  # what ranks held when memory did not suffice, and what to turn on; "" for other incidents

    @property
    def peer_lost(self) -> bool:
        """Whether it only says that another rank was lost."""
        return self.failure is not None and self.failure[0].peer_lost


@dataclass(frozen=True, kw_only=True)
class Wording:
    """Phrases and types for the errors of a request."""

    what: str = "the cell"  # what was asked, as the subject of a sentence: ``the cell``
    limit: str = "{seconds:g} s"  # its timeout; ``{seconds}`` stands for the number
    owner: str = "pool.Pool"  # has its `Timeouts`, in ``nb_accelerate.notebook``
    after_end: Callable[[RankProxy], str] = lambda _: ""  # what follows "rank 1 was ended by SIGKILL"
    unusable: type[LaunchError] = LaunchError  # type of the error about a rank that is of no use any more
    unseen: type[LaunchError] = StartError  # type of the error about a rank whose exit code is not known


def first_cause(incidents: Iterable[Incident]) -> Incident:
    """Return the incident that explains the others.

    An interrupt of the user comes first. Of other incidents the earliest does, but incidents that only say that another
    rank was lost come after the rest, and incidents after ranks were signalled come last.
    """

    def order(incident: Incident) -> tuple[bool, bool, bool, float]:
        interrupted = incident.kind is IncidentKind.INTERRUPTED
        return not interrupted, incident.is_consequence, incident.peer_lost, incident.when

    return min(incidents, key=order)


_OOM_KILLS = re.compile(rb"^oom_kill (\d+)", re.MULTILINE)
_OOM_COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))


def oom_kills(counters: tuple[Path, ...] = _OOM_COUNTERS) -> int:
    """Return how many processes the out-of-memory killer has killed since the system, or the container, started."""
    num_kills = 0
    for path in counters:
        with contextlib.suppress(OSError):  # not Linux, or no such controller
            line = _OOM_KILLS.search(path.read_bytes())
            num_kills += int(line[1]) if line else 0
    return num_kills


def shortage_on(rank: RankProxy, ranks: Sequence[RankProxy], report: ErrorReport | None = None) -> str:
    """Return who held what, and what to turn on; "" if memory did suffice, or no rank has prepared a model.

    Args:
        ranks: all of them. Their progress pages are read, so this is for the loop's thread.
    """
    if report is not None and not says_out_of_memory(report.type_name, report.message):
        return ""
    wanted = 0 if report is None else bytes_wanted(report.message)
    return shortage({other.rank: other.handle.page.read() for other in ranks}, failed=rank.rank, wanted=wanted)
