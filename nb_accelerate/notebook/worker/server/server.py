"""The process that starts and reaps the ranks of a launch or pool. It has one thread, and runs no user's code.

::

    kernel ---- control channel ----> server ---- fork ----> rank
       |   SignalRank, Quit           |                      |
       |                              | waits for its        | talks to the kernel over
       |                              | children             | its own descriptors
       <---- exit status, by a pipe --+                      |
       <--------------------------- channel, output ---------+

There are two kinds: one is a fresh interpreter and starts ranks whenever it is told to
(`notebook.worker.server.executed`), the other is a fork of the kernel that forks its ranks at once
(`notebook.worker.server.forked`). On the control channel a server sends `Serves` when it can take messages, and `Quit`
when it ends. Ranks have channels of their own, and exit statuses go through one pipe for all that are
started together.

The server ends when the kernel does (it waits for the kernel's process descriptor, and for the end of the channel), and
kills its ranks first. Ranks end when the server does (parent-death signal). Processes that a rank leaves behind, such
as workers of a loader, are adopted by the server and killed, also if they have begun a session of their own.

::

    process group of the kernel:  kernel, ranks        a hard shutdown of the kernel ends all of it at once
    of its own, in that session:  server               lives on for a moment, to end what ranks have left behind
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from nb_accelerate.errors import StartError
from nb_accelerate.notebook.protocol.channel import Channel
from nb_accelerate.notebook.protocol.messages import Quit, RankEnds
from nb_accelerate.notebook.worker.call import fail
from nb_accelerate.notebook.worker.server.limits import why_no_room
from nb_accelerate.notebook.worker.server.process_tree import (
    adopt_orphans,
    children,
    is_tracker,
    leave_group,
    open_process,
    send_signal,
)
from nb_accelerate.notebook.worker.server.scratch import remove_abandoned

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from nb_accelerate.notebook.worker.server.scratch import Scratch

# What is written to the status pipe of a rank that ended: its key; exit code, or minus the signal's number.
END_REPORT = struct.Struct("!qq")


@dataclass(frozen=True, kw_only=True)
class SignalRank:
    """Send a signal to a rank, if it still runs."""

    key: int
    signum: int


@dataclass(frozen=True, kw_only=True)
class Serves:
    """The server takes messages from now on. It has imported what it was told to."""


_KILL_ORPHANS_TIMEOUT = 3.0  # seconds in which processes that ranks have left behind are killed; they may fork for ever
_KILLED_INTERVAL = 0.02  # seconds between two looks at processes that were killed and have not ended yet


@dataclass
class _Rank:
    key: int
    status_fd: int


def refuse_rank(key: int, status_fd: int, fds: Sequence[int], error: OSError) -> None:
    """Report that a rank could not be forked, over its own channel and its status pipe, which is closed here."""
    reason = StartError(f"a rank could not be forked: {': '.join(filter(None, (error.strerror, why_no_room(error))))}")
    failure, packed = fail(reason, result_of_call=False)
    channel = Channel.from_fd(os.dup(RankEnds.from_tuple(tuple(fds)).control))
    channel.send(failure, packed.fds if packed else ())
    channel.close()
    os.write(status_fd, END_REPORT.pack(key, os.EX_OSERR))
    os.close(status_fd)


class Server:
    """Signals ranks, reaps them, and ends what they leave behind."""

    def __init__(self, control: Channel, parent: int, scratch: Scratch) -> None:
        leave_group()
        self._control = control
        self._parent = parent
        self._ranks: dict[int, _Rank] = {}
        self._adopts = adopt_orphans()
        self._selector = selectors.DefaultSelector()
        self._own_fds: list[int] = []
        self._scratch = scratch

    def own(self, pid: int, key: int, status_fd: int) -> None:
        """Reap a rank that was forked from here, and report its exit status to a pipe, which is taken over."""
        self._ranks[pid] = _Rank(key, status_fd)

    def run(self) -> NoReturn:
        """Run until the kernel ends, closes the channel or sends `Quit`."""
        wakeup_read, wakeup_write = os.pipe()
        for fd in (wakeup_read, wakeup_write):
            os.set_blocking(fd, False)
        # A handler that does nothing: with one Python writes to the wakeup descriptor, and the system keeps the exit
        # status until it is asked for.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Sent to a stopped process whose parent has ended, by which it goes on: this one then ends what it has started.
        self._hangup = signal.signal(signal.SIGHUP, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        self._own_fds += [wakeup_read, wakeup_write]
        self._selector.register(wakeup_read, selectors.EVENT_READ, "child")
        self._selector.register(self._control, selectors.EVENT_READ, "control")
        # The channel's end may be hidden: a process the notebook forked holds a copy of the kernel's side.
        if (parent := open_process(self._parent)) >= 0:
            self._own_fds.append(parent)
            self._selector.register(parent, selectors.EVENT_READ, "parent")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # a thread of the kernel's may have blocked it
        self._reap()  # ranks that ended before there was a handler
        # Where the system has no descriptors of processes, this alone tells that the kernel has gone.
        while os.getppid() == self._parent:
            pause = self._pause()
            events = self._selector.select(pause)
            if not events and pause is not None:
                self._use_pause()
            for key, _ in events:
                if key.data == "control" and not self._read_control():
                    self._end()
                elif key.data == "child":
                    with contextlib.suppress(BlockingIOError):
                        os.read(wakeup_read, 1 << 12)
                    self._reap()
                elif key.data == "parent":
                    self._end()
        self._end()

    # What the two kinds differ in.

    def _pause(self) -> float | None:
        """Return after how many idle seconds `_use_pause` is called; None for never."""
        return None

    def _use_pause(self) -> None:
        """Do what can wait until nobody waits for anything else."""

    def _take(self, message: Any, fds: tuple[int, ...]) -> None:
        """Handle a message that not every server knows. Descriptors that came with it are taken over."""

    def _spare(self) -> Collection[int]:
        """Return the process ids of children that are no ranks."""
        return ()

    def _tidy(self) -> None:
        """Remove what this process has left, at its end."""

    def _has_ended(self, pid: int) -> None:
        """Forget a child that was no rank and has ended."""

    # What they have in common.

    def _read_control(self) -> bool:
        messages, is_open = self._control.drain()
        for message, fds in messages:
            if isinstance(message, Quit):
                return False
            if isinstance(message, SignalRank):
                for pid, rank in self._ranks.items():
                    if rank.key == message.key:
                        send_signal(pid, message.signum)
            else:
                self._take(message, fds)
        return is_open

    def _reap(self) -> None:
        ended = []
        is_alone = False
        try:
            # One SIGCHLD may stand for several children.
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                rank = self._ranks.pop(pid, None)
                if rank is not None:
                    ended.append((rank, status))
                else:
                    self._has_ended(pid)
        except ChildProcessError:
            is_alone = True
        # A rank that left in good order has ended its own children, or left some behind on purpose. One that was killed
        # has not. All are to be gone once its launch returns, which waits for its last rank.
        if not is_alone and ended and (not self._ranks or any(status for _, status in ended)):
            self._kill_adopted()
        for rank, status in ended:
            self._scratch.remove(str(rank.key))
            with contextlib.suppress(BrokenPipeError):
                os.write(rank.status_fd, END_REPORT.pack(rank.key, os.waitstatus_to_exitcode(status)))
            os.close(rank.status_fd)

    def _kill_adopted(self) -> None:
        deadline = time.monotonic() + _KILL_ORPHANS_TIMEOUT
        asked: set[int] = set()
        while self._adopts and time.monotonic() < deadline:
            orphans = [pid for pid in children() if pid not in self._ranks and pid not in self._spare()]
            # At once and the newest first, or one that forks for ever has done so by then, and ended.
            ending = [pid for pid in reversed(orphans) if (pid in asked or not is_tracker(pid)) and _kill(pid)]
            ended = [pid for pid in ending if os.waitpid(pid, os.WNOHANG)[0]]  # their own children come to us next
            if not ending:
                return
            if not ended and asked.issuperset(ending):
                time.sleep(_KILLED_INTERVAL)  # a large one takes its time
            asked.update(ending)

    def _end(self) -> NoReturn:
        # Those of another user are left to them.
        for pid in [pid for pid in (*self._ranks, *self._spare()) if _kill(pid)]:
            os.waitpid(pid, 0)
        for rank in self._ranks.values():
            self._scratch.remove(str(rank.key))
        self._ranks.clear()
        self._kill_adopted()
        with contextlib.suppress(OSError):  # the kernel has gone
            self._control.send(Quit())
        remove_abandoned()
        self._tidy()
        os._exit(0)


def _kill(pid: int) -> bool:
    """Kill a process. Return False if it belongs to another user."""
    return send_signal(pid, signal.SIGKILL)
