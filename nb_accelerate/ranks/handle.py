"""What the notebook needs to know of a rank, wherever it runs.

A process of this machine is one kind of rank (`nb_accelerate.launch.local`). An actor of an engine, or a process of
another machine, is another: it implements this class, and nothing above it changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.progress_page import PageReader
    from nb_accelerate.protocol.channel import Channel
    from nb_accelerate.protocol.messages import Call, Join, RunCell


class RankHandle(ABC):
    """Owns the notebook's ends of a rank's connections. `RankLoop` reads them, in one thread.

    Attributes:
        rank: its number among all ranks.
        local_rank: its number among those of its machine.
        mark: mark of its output frames.
        channel: messages to and from it.
        page: the progress page on which it says how far it is.
        stdout: descriptor with what Python prints and C code writes to descriptor 1.
        stderr: descriptor with what C code writes to descriptor 2.
        stacks: descriptor with the stacks of its threads, after `dump_stacks`.
        status: descriptor that becomes readable when the rank has ended; see `read_end`.
        ended: it is gone, or nobody can tell: `lost` says why then.
        exitcode: once it has ended: exit code, or minus the signal's number; None also if its end went unseen.
        lost: why its end went unseen.
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
    ended: bool = False
    exitcode: int | None = None
    lost: str = ""

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """Its process id once it is ready. The loop sets it when the rank says so."""

    @pid.setter
    @abstractmethod
    def pid(self, pid: int) -> None: ...

    @abstractmethod
    def ask(self, message: Call | Join | RunCell, fds: Sequence[int] = ()) -> None:
        """Send what the rank is to answer. An interrupt is meant for what was asked last.

        Raises:
            OSError: it has ended.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in what the rank was asked last, and nowhere else."""

    @abstractmethod
    def nudge(self) -> None:
        """Wake up a rank that was about to wait for something when the interrupt came."""

    @abstractmethod
    def dump_stacks(self) -> None:
        """Have it write where all its threads are to `stacks`, also while C code holds the interpreter."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask its process to end."""

    @abstractmethod
    def kill(self) -> None:
        """End its process."""

    @abstractmethod
    def is_stopped(self) -> bool:
        """Tell whether somebody has suspended it, as SIGSTOP does: no event says so."""

    @abstractmethod
    def is_lost(self) -> bool:
        """Tell whether nobody will say that it has ended, although it was told to. Then `give_up`."""

    @abstractmethod
    def give_up(self) -> None:
        """Kill it, and take it for ended."""

    @abstractmethod
    def read_end(self) -> None:
        """Read how it ended from `status`, which is readable.

        Raises:
            OSError: it cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Close every descriptor. The rank, if it lives, sees the end of its channel."""
