"""The interface between the notebook and one rank, wherever that runs.

`notebook.launch.local.LocalRank` is a process of this machine. An actor of an engine, or a process of another
machine, needs a class of its own; `RankLoop` and what is above it stay as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.base.progress_page import PageReader
    from nb_accelerate.notebook.protocol.channel import Channel
    from nb_accelerate.notebook.protocol.messages import Call, Join, RunCell


class RankHandle(ABC):
    """Owns the notebook's ends of a rank's connections. Only the thread of a `RankLoop` reads them.

    Attributes:
        mark: mark of its output frames, see `notebook.protocol.output`.
        stdout: descriptor with what Python prints and C code writes to descriptor 1.
        stderr: descriptor with what C code writes to descriptor 2.
        stacks: descriptor with the stack of its main thread, after `dump_stacks`.
        status: descriptor that becomes readable when the rank has ended; see `read_end`.
        ended: whether it has ended, or was given up.
        exitcode: its exit code or minus the number of its signal; None before it has ended, or if that is not known.
        lost: why its exit code is not known.
        is_lost_with_others: for that reason all ranks that were forked from the same process have ended too.
    """

    rank: int
    local_rank: int
    mark: bytes
    channel: Channel
    page: PageReader
    stdout: int
    stderr: int
    stacks: int
    status: int
    pid: int | None = None
    ended: bool = False
    exitcode: int | None = None
    lost: str = ""
    is_lost_with_others: bool = False

    def note_pid(self, pid: int) -> None:
        """Note its process id, which it sends when it is ready."""
        self.pid = pid

    @abstractmethod
    def ask(self, message: Call | Join | RunCell, fds: Sequence[int] = ()) -> None:
        """Send a message that the rank answers, and descriptors, which stay the caller's. `interrupt` interrupts it.

        Raises:
            OSError: it has ended.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in what the rank was asked last, if it still runs that."""

    @abstractmethod
    def nudge(self) -> None:
        """Wake up a rank that had begun to wait for something just when an interrupt came."""

    @abstractmethod
    def dump_stacks(self, *, by_signal: bool = False) -> None:
        """Have it write where its main thread is to `stacks`.

        Args:
            by_signal: have C code do it, also while C code holds the interpreter. Python code may crash in it.
        """

    def note_line(self) -> None:
        """Have it write the line of the user's code that it is at to its page; nothing happens if it cannot."""
        return

    def processor_time(self) -> float | None:
        """Return the seconds on a processor of its process and those that it has started.

        None if that cannot be told, or one of them computes, waits for a processor or for a disk now.
        """
        return None

    @abstractmethod
    def terminate(self) -> None:
        """Ask its process to end."""

    @abstractmethod
    def kill(self) -> None:
        """End its process."""

    @abstractmethod
    def is_stopped(self) -> bool:
        """Return whether somebody has suspended it (SIGSTOP). No event reports that."""

    @abstractmethod
    def is_lost(self) -> bool:
        """Return whether its end will never be reported, although it was told to end. The loop then calls `give_up`."""

    @abstractmethod
    def give_up(self) -> None:
        """Kill it, and treat it as ended."""

    @abstractmethod
    def read_end(self) -> None:
        """Read its exit code from `status`, which is readable. Raises OSError."""

    @abstractmethod
    def close(self) -> None:
        """Close every descriptor. The rank, if it lives, sees the end of its channel."""
