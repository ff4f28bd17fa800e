"""The process that owns the ranks of a launch or pool: single-threaded, and without anything of the notebook's at work.

::

    kernel ---- control channel ----> server ---- fork ----> rank
       |   SignalRank, Quit           |                      |
       |                              | waits for its        | talks to the kernel over
       |                              | children             | its own descriptors
       <---- exit status, by a pipe --+                      |
       <--------------------------- channel, output ---------+

There are two: one is a fresh interpreter and starts ranks whenever it is told to (`nb_accelerate.worker.executed`), the
other a fork of the kernel and comes with its ranks (`nb_accelerate.worker.forked`). A server answers nothing on the
control channel but that it is there (`Serves`) and that it quits: a rank speaks for itself, and its end is told by
eight bytes in a pipe of its own.

Who dies with whom: the server ends when the kernel does (it waits for the kernel's process descriptor, and for the
end of the channel), and kills its ranks first. Ranks end when the server does (parent-death signal). What a rank leaves
behind, a loader's workers say, is adopted by the server and killed, also where it has begun a session of its own.

::

    process group of the kernel:  kernel, ranks        a hard shutdown of the kernel ends all of it at once
    of its own, in that session:  server               lives on for a moment, to end what ranks have left behind

Being alone in its group, a server that was stopped is told to go on when its kernel ends (SIGHUP, SIGCONT): its group
then is an orphan. It ends too, and its ranks with it.
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
from nb_accelerate.protocol.channel import Channel
from nb_accelerate.protocol.messages import Quit
from nb_accelerate.worker.call import fail
from nb_accelerate.worker.ends import RankEnds
from nb_accelerate.worker.limits import why_no_room
from nb_accelerate.worker.process_tree import adopt_orphans, children, is_tracker, kill, leave_group
from nb_accelerate.worker.scratch import remove_abandoned

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from nb_accelerate.worker.scratch import Scratch

EXIT_STATUS = struct.Struct("!q")
"""What is written to the pipe of a rank that ended: exit code, or minus the signal's number."""


@dataclass(frozen=True, kw_only=True)
class SignalRank:
    """Send a signal to a rank, if it still runs."""

    key: int
    signum: int


@dataclass(frozen=True, kw_only=True)
class Serves:
    """The server takes messages from now on: what it had to import has been imported."""


_ENDING = 3.0
"""Seconds for what ranks have left behind, which may fork and exit for ever."""

_GLANCE = 0.02
"""Seconds after which to look again at processes that were killed and have not ended yet."""


@dataclass
class _Rank:
    key: int
    status_fd: int


def refuse_rank(status_fd: int, fds: Sequence[int], error: OSError) -> None:
    """Answer for a rank that could not be forked.

    Args:
        status_fd: write end of its status pipe; closed.
        fds: its `RankEnds`; whoever has them closes them.
        error: why.
    """
    reason = StartError(f"a rank could not be forked: {': '.join(filter(None, (error.strerror, why_no_room(error))))}")
    failure, packed = fail(reason, result_of_call=False)
    channel = Channel.from_fd(os.dup(RankEnds.from_tuple(tuple(fds)).control))
    channel.send(failure, packed.fds if packed else ())
    channel.close()
    os.write(status_fd, EXIT_STATUS.pack(os.EX_OSERR))
    os.close(status_fd)


class Server:
    """Ranks, and all that is done for them after they are born.

    Args:
        control: this end of the control channel.
        parent: process id of the kernel.
        scratch: folders of its ranks.
    """

    def __init__(self, control: Channel, parent: int, scratch: Scratch) -> None:
        leave_group()
        # A stopped process whose kernel ends is sent this, and then told to go on.
        self._former_hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._control = control
        self._parent = parent
        self._ranks: dict[int, _Rank] = {}
        self._adopts = adopt_orphans()
        self._selector = selectors.DefaultSelector()
        self._own_fds: list[int] = []
        self._scratch = scratch

    def own(self, pid: int, key: int, status_fd: int) -> None:
        """Look after a rank that was forked from here, and tell of its end.

        Args:
            pid: its process id.
            key: names it in `SignalRank`, and its folder.
            status_fd: write end of its status pipe; taken over.
        """
        self._ranks[pid] = _Rank(key, status_fd)

    def run(self) -> NoReturn:
        """Be the server until the kernel ends, closes the channel or says `Quit`."""
        wakeup_read, wakeup_write = os.pipe()
        for fd in (wakeup_read, wakeup_write):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        self._own_fds += [wakeup_read, wakeup_write]
        self._selector.register(wakeup_read, selectors.EVENT_READ, "child")
        self._selector.register(self._control, selectors.EVENT_READ, "control")
        with contextlib.suppress(AttributeError, OSError):  # not on macOS, not on old or emulated kernels
            # The channel's end may be hidden: a process the notebook forked holds a copy of the kernel's side.
            pidfd = os.pidfd_open(self._parent)
            self._own_fds.append(pidfd)
            self._selector.register(pidfd, selectors.EVENT_READ, "parent")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # a thread of the kernel's may have blocked it
        self._reap()  # who ended before there was a handler
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

    # What the two differ in.

    def _pause(self) -> float | None:
        """Seconds without anything to do after which there is time for `_use_pause`; None if nothing is left for it."""
        return None

    def _use_pause(self) -> None:
        """Nobody waits for anything now."""

    def _take(self, message: Any, fds: tuple[int, ...]) -> None:
        """A message that is not every server's."""

    def _spare(self) -> Collection[int]:
        """Process ids of children that are no ranks."""
        return ()

    def _has_ended(self, pid: int) -> None:
        """A child that was no rank has ended."""

    # What they have in common.

    def _read_control(self) -> bool:
        messages, is_open = self._control.drain()
        for message, fds in messages:
            if isinstance(message, Quit):
                return False
            if isinstance(message, SignalRank):
                for pid, rank in self._ranks.items():
                    if rank.key == message.key:
                        kill(pid, message.signum)
            else:
                self._take(message, fds)
        return is_open

    def _reap(self) -> None:
        ended = []
        is_alone = False
        try:
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
                os.write(rank.status_fd, EXIT_STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(rank.status_fd)

    def _kill_adopted(self) -> None:
        """End what ranks left behind."""
        deadline = time.monotonic() + _ENDING
        asked: set[int] = set()
        while self._adopts and time.monotonic() < deadline:
            orphans = [pid for pid in children() if pid not in self._ranks and pid not in self._spare()]
            # At once and the newest first, or one that forks for ever has done so by then, and ended.
            ending = [pid for pid in reversed(orphans) if (pid in asked or not is_tracker(pid)) and kill(pid)]
            ended = [pid for pid in ending if os.waitpid(pid, os.WNOHANG)[0]]  # their own children come to us next
            if not ending:
                return
            if not ended and asked.issuperset(ending):
                time.sleep(_GLANCE)  # a large one takes its time
            asked.update(ending)

    def _end(self) -> NoReturn:
        # Those of another user are left to them.
        for pid in [pid for pid in (*self._ranks, *self._spare()) if kill(pid)]:
            os.waitpid(pid, 0)
        for rank in self._ranks.values():
            self._scratch.remove(str(rank.key))
        self._ranks.clear()
        self._kill_adopted()
        with contextlib.suppress(OSError):  # the kernel has gone
            self._control.send(Quit())
        remove_abandoned()
        os._exit(0)
