"""The file descriptors that a rank starts with: its ends of everything that connects it to the kernel."""

from __future__ import annotations

import signal
from dataclasses import dataclass, fields

NUDGE = signal.SIGURG
"""Signal that follows SIGINT. Programs that do not handle it ignore it, and few handle it."""


@dataclass(frozen=True, kw_only=True)
class RankEnds:
    """Open file descriptors. The rank owns them."""

    control: int  # its end of the channel
    stdout: int  # write end of the pipe for everything Python prints and C code writes to descriptor 1
    stderr: int  # write end of the pipe for what C code writes to descriptor 2
    stacks: int  # a socket; it takes requests (`notebook.worker.stack_writer`), and stacks of the main thread
    page: int  # the page on which it says how far it is, and reads which call or cell SIGINT is meant for
    store: int = -1  # the file that is the store through which ranks meet, or a listening socket to serve it on; or -1

    def as_tuple(self) -> tuple[int, ...]:
        """Return the open ones in the order of the fields, as they are sent."""
        return tuple(fd for fd in (getattr(self, field.name) for field in fields(self)) if fd >= 0)

    @classmethod
    def from_tuple(cls, fds: tuple[int, ...]) -> RankEnds:
        """Return what `as_tuple` was called on."""
        return cls(**dict(zip((field.name for field in fields(cls)), fds, strict=False)))
