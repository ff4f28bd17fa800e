"""The interface between the notebook and one rank, wherever that runs.

::

    rank ..... what it sends .....> RankHandle --> RankEvents --> RankLoop
    rank <.... what it is told .... RankHandle <----------------- RankLoop

`notebook.launch.local.LocalRank` is a process of this machine, which is read over descriptors of its own
(`notebook.ranks.piped`). `notebook.remote.rank.RemoteRank` is one of another machine, which shares one connection with
the other ranks there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from nb_accelerate.notebook.diagnostics.stacks import DUMP_SIGNAL
from nb_accelerate.notebook.protocol.channel import as_bytes
from nb_accelerate.notebook.protocol.messages import NUDGE
from nb_accelerate.notebook.worker.stack_writer import ASK_LINE, ASK_STACK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nb_accelerate.base.progress_page import PageReader
    from nb_accelerate.notebook.protocol.channel import Received
    from nb_accelerate.notebook.protocol.messages import Call, CutOff, Join, RunCell
    from nb_accelerate.notebook.ranks.sources import Sources


class RankEvents(ABC):
    """Takes what a rank sends. Its handle calls it, in the thread of the `RankLoop`."""

    @abstractmethod
    def messages(self, received: Iterable[Received]) -> None:
        """Take messages, whose descriptors are taken over, until `hand_on` is called."""

    @abstractmethod
    def hand_on(self) -> None:
        """Hand on the messages that were taken, after what the rank has printed before (`RankHandle.catch_up`)."""

    @abstractmethod
    def stdout(self, data: bytes) -> None:
        """Take what Python has printed and C code has written to descriptor 1; see `notebook.protocol.output`."""

    @abstractmethod
    def stderr(self, data: bytes) -> None:
        """Take what C code has written to descriptor 2."""

    @abstractmethod
    def stacks(self, data: bytes) -> None:
        """Take a piece of the stack of its main thread, for which `RankHandle.dump_stacks` asks."""

    @abstractmethod
    def cannot_read(self, error: Exception) -> None:
        """Take the error of a message that cannot be read. No other message follows."""

    @abstractmethod
    def ended(self) -> None:
        """Note that the rank has ended. Nothing follows, and attributes of the handle say how."""


class RankHandle(ABC):
    """Owns the notebook's ends of a rank's connections. Only the thread of a `RankLoop` reads them.

    Attributes:
        exitcode: its exit code or minus the number of its signal; None before it has ended, or if that is not known.
    """

    rank: int
    local_rank: int
    mark: bytes  # mark of its output frames, see `notebook.protocol.output`
    page: PageReader
    pid: int | None = None
    machine: str = ""  # the name of its machine; "" for this one. Process ids of others are never looked up here.
    ended: bool = False  # whether it has ended, or was given up
    exitcode: int | None = None
    lost: str = ""  # why its exit code is not known
    is_lost_with_others: bool = False  # for that reason all ranks that were forked from the same process have ended too
    neighbours: Sequence[int] | None = None  # these ranks; None if they are all others.

    def note_pid(self, pid: int) -> None:
        """Note its process id, which it sends when it is ready."""
        self.pid = pid

    @abstractmethod
    def connect(self, sources: Sources, events: RankEvents) -> None:
        """Have `events` take what the rank sends, from now on, whenever `sources` is waited for."""

    @abstractmethod
    def disconnect(self) -> None:
        """Read nothing more of it. Can be repeated, and called before `connect`."""

    @abstractmethod
    def catch_up(self) -> None:
        """Read what it has printed until now, and no more: a rank may print faster than it is read here."""

    @abstractmethod
    def receive(self) -> None:
        """Read the messages that have come until now. They are not handed on."""

    @abstractmethod
    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send a message that the rank does not answer, and descriptors, which stay the caller's.

        Raises:
            OSError: it has ended.
        """

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
    def signal(self, signum: int) -> None:
        """Send a signal to its process; nothing happens if that has ended."""

    @abstractmethod
    def request(self, what: bytes) -> None:
        """Send a request to the thread of `notebook.worker.stack_writer`; nothing happens if the rank has ended."""

    def nudge(self) -> None:
        """Wake up a rank that had begun to wait for something just when an interrupt came."""
        self.signal(NUDGE)

    def dump_stacks(self, *, by_signal: bool = False) -> None:
        """Have it write where its main thread is; see `RankEvents.stacks`.

        Args:
            by_signal: have C code do it, also while C code holds the interpreter. Python code may crash in it.
        """
        if by_signal:
            self.signal(DUMP_SIGNAL)
        else:
            self.request(ASK_STACK)

    def cut_off(self, message: CutOff) -> None:
        """Take it out of the collective that it is in; nothing happens if it has ended."""
        self.request(as_bytes(message))

    def note_line(self) -> None:
        """Have it write the line of the user's code that it is at to its page; nothing happens if it cannot."""
        self.request(ASK_LINE)

    def processor_time(self) -> float | None:
        """Return the processor seconds of its process and of processes that it has started.

        None if that cannot be told, or one of them computes, waits for a processor or for a disk now.
        """
        return None

    def starting(self) -> tuple[float, str]:
        """Return how much was done for its start until now, and where it is: ``importing torch``.

        The number grows by one with each second of a processor, and with each megabyte that is read from files. Before
        the rank has told its process id, all that the process which starts it and its other ranks do is counted.
        """
        return 0.0, ""

    def memory(self) -> int:
        """Return the bytes of main memory that its process holds (RSS); 0 if that cannot be told.

        Not for the loop's thread.
        """
        return 0

    def unsent(self) -> tuple[int, int]:
        """Return the bytes that are still to be sent to its machine, and those of large values in all."""
        return 0, 0

    def is_slow(self) -> bool:
        """Return whether what was sent to its machine may not have come there."""
        return False

    @abstractmethod
    def terminate(self) -> None:
        """Ask its process to end."""

    @abstractmethod
    def kill(self) -> None:
        """End its process."""

    @abstractmethod
    def is_lost(self) -> bool:
        """Return whether its end will never be reported, although it was told to end. The loop then calls `give_up`."""

    @abstractmethod
    def give_up(self) -> None:
        """Kill it, and treat it as ended."""

    @abstractmethod
    def close(self) -> None:
        """Close every descriptor. The rank, if it lives, sees the end of its channel."""
