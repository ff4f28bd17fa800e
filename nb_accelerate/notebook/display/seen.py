"""A rank as the notebook sees it from outside: what its progress page says, and its process."""

from __future__ import annotations

from dataclasses import dataclass, field

from nb_accelerate.base.progress_page import Sample


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Hold what is seen of a rank at one moment.

    Attributes:
        rank: its number.
        sample: what its page says.
        state: ``starting``, ``running``, ``stopped`` (SIGSTOP), ``returned``, ``failed`` or ``ended``.
        memory: bytes of its process.
        cpu: percent of one core that its process used lately; None if that is not known.
        pid: its process; None while it starts.
    """

    rank: int
    sample: Sample = field(default_factory=Sample)
    state: str = "running"
    memory: int = 0
    cpu: float | None = None
    pid: int | None = None
