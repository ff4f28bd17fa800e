"""What can go wrong in a request, as data; which of it is the cause; and how errors about it are phrased."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.errors import LaunchError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nb_accelerate.notebook.protocol.messages import Failure, Result
    from nb_accelerate.notebook.ranks.proxy import RankProxy

    Answer = tuple[Result | Failure, tuple[int, ...]]
    """What a rank has answered, and the descriptors that came with it."""

INTERRUPTED, STOPPED = "interrupted", "stopped"
"""See ``how`` of `Incident`. Stopped: all ranks were to end at once."""


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
    """One thing that went wrong in a request.

    Attributes:
        when: `time.monotonic` at which it happened or was noticed.
        rank: the rank that it happened on; None if it concerns several.
        failure: with ``FAILED``, the answer. The thread that has asked makes an exception of it later.
        error: with ``UNASKED``, why the message could not be sent; with ``ABANDONED``, why ranks cannot go on.
        tail: the last output of the rank.
        late: with ``NOT_STARTED`` and ``LATE``, the ranks that were not ready or had not answered.
        how: with ``INTERRUPTED``, what the user did, as a participle.
        is_consequence: whether ranks had been signalled before.
        out_of_memory: whether the system's out-of-memory killer has killed a process since the request began.
        memory: what ranks held when memory did not suffice, and what to turn on; "" for other incidents.
    """

    kind: IncidentKind
    when: float
    rank: RankProxy | None = None
    failure: tuple[Failure, tuple[int, ...]] | None = None
    error: BaseException | None = None
    tail: str = ""
    late: tuple[int, ...] = ()
    how: str = ""
    is_consequence: bool = False
    out_of_memory: bool = False
    memory: str = ""

    @property
    def peer_lost(self) -> bool:
        """Whether it only says that another rank was lost."""
        return self.failure is not None and self.failure[0].peer_lost


@dataclass(frozen=True, kw_only=True)
class Wording:
    """Phrases and types for the errors of a request.

    Attributes:
        what: what was asked, as the subject of a sentence: ``the cell``.
        limit: its timeout; ``{seconds}`` stands for the number.
        after_end: returns what follows "rank 1 was ended by SIGKILL" about a rank, up to the full stop.
        unusable: type of the error about a rank that is of no use any more.
        unseen: type of the error about a rank whose exit code is not known.
    """

    what: str = "the cell"
    limit: str = "{seconds:g} s"
    after_end: Callable[[RankProxy], str] = lambda _: ""
    unusable: type[LaunchError] = LaunchError
    unseen: type[LaunchError] = StartError


def first_cause(incidents: Iterable[Incident]) -> Incident:
    """Return the incident that explains the others.

    An interrupt of the user comes first. Of other incidents the earliest does, but those that only say that another
    rank was lost come after the rest, and those that happened after ranks were signalled come last.
    """

    def order(incident: Incident) -> tuple[bool, bool, bool, float]:
        interrupted = incident.kind is IncidentKind.INTERRUPTED
        return not interrupted, incident.is_consequence, incident.peer_lost, incident.when

    return min(incidents, key=order)
