"""The kernel's side of one rank: what it reads from, writes to, and knows about it."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from nb_accelerate.board import Page
from nb_accelerate.protocol.channel import Channel
from nb_accelerate.protocol.output import new_mark
from nb_accelerate.worker.ends import NUMBER, RankEnds
from nb_accelerate.worker.server import EXIT_STATUS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.protocol.messages import Call, Join, RunCell

NUDGE_AFTER = 0.15
"""Seconds after an interrupt until ranks are nudged that were about to wait for something when it came."""


class RankHandle:
    """Owns the kernel's ends of a rank's connections.

    Attributes:
        rank: its number among all ranks.
        local_rank: its number among those of this machine.
        mark: mark of its output frames.
        channel: messages to and from it.
        board: where it says how far it is.
        stdout, stderr, stacks, status: read ends of its pipes; see `RankEnds`, and the server for ``status``.
        pid: its process id once it is ready.
        exitcode: once it has ended: exit code, or minus the signal's number; None also if its end went unseen.
        ended: its process is gone.

    Raises:
        OSError: too many files are open. Nothing of it is left then, nor is `store_fd`.
    """

    def __init__(self, rank: int, *, local_rank: int = 0, store_fd: int = -1) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.mark = new_mark()
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.ended = False
        self._born = False
        self._signal: Callable[[int], None] = lambda _: None
        self._asked = 0
        with contextlib.ExitStack() as undo:
            if store_fd >= 0:
                undo.callback(os.close, store_fd)
            self.board = Page()
            undo.callback(self.board.close)
            self.channel, there = Channel.pair()
            undo.callback(self.channel.close)
            undo.callback(there.close)
            self.stdout, stdout = _pipe(undo)
            self.stderr, stderr = _pipe(undo)
            self.stacks, stacks = _pipe(undo)
            self.status, self._status_end = _pipe(undo)
            interrupt, self._interrupt = _pipe(undo)
            for fd in (self.stdout, self.stderr, self.stacks, self.status, self._interrupt):
                os.set_blocking(fd, False)
            board = os.dup(self.board.fd)
            undo.pop_all()
        self._ends = RankEnds(
            control=there.detach(),
            stdout=stdout,
            stderr=stderr,
            interrupt=interrupt,
            stacks=stacks,
            board=board,
            store=store_fd,
        )

    @property
    def birth_fds(self) -> tuple[int, ...]:
        """What the process that starts the rank needs: its status pipe, then the rank's own ends."""
        return (self._status_end, *self._ends.as_tuple())

    def born(self, send_signal: Callable[[int], None]) -> None:
        """The other side has its ends: close ours of them, and remember how to signal the rank."""
        self._close_birth_fds()
        self._signal = send_signal

    def signal(self, signum: int) -> None:
        """Send a signal, if the rank still runs."""
        if not self.ended:
            self._signal(signum)

    def ask(self, message: Call | Join | RunCell, fds: Sequence[int] = ()) -> None:
        """Send what the rank is to answer.

        Raises:
            OSError: it has ended.
        """
        self.channel.send(message, fds)
        self._asked += 1

    def announce_interrupt(self) -> None:
        """Say that SIGINT is meant for what the rank was asked last."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._interrupt, NUMBER.pack(self._asked))

    def read_status(self) -> None:
        """The status pipe is readable: the rank has ended, or whoever watched it has."""
        data = os.read(self.status, EXIT_STATUS.size)
        self.ended = True
        if len(data) == EXIT_STATUS.size:
            (self.exitcode,) = EXIT_STATUS.unpack(data)

    def close(self) -> None:
        """Close every descriptor. The rank, if it lives, sees the end of its channel."""
        self._close_birth_fds()
        self.close_ours()

    def close_ours(self) -> None:
        """Close the kernel's ends, in a process that is to become the rank or start it."""
        self.board.close()
        self.channel.close()
        for fd in (self.stdout, self.stderr, self.stacks, self.status, self._interrupt):
            os.close(fd)

    def _close_birth_fds(self) -> None:
        if not self._born:
            self._born = True
            for fd in self.birth_fds:
                os.close(fd)


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for fd in ends:
        undo.callback(os.close, fd)
    return ends
