"""A rank that is a process of this machine, started by a server: see `notebook.launch.servers`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING

import psutil
from typing_extensions import override

from nb_accelerate.base.progress_page import PageReader
from nb_accelerate.notebook.protocol.anonymous_file import anonymous_file
from nb_accelerate.notebook.protocol.channel import Channel
from nb_accelerate.notebook.protocol.interrupts import interrupts_later
from nb_accelerate.notebook.protocol.messages import RankEnds
from nb_accelerate.notebook.protocol.output import new_mark
from nb_accelerate.notebook.ranks.piped import PipedRank
from nb_accelerate.notebook.ranks.start_watch import work_of
from nb_accelerate.notebook.worker.server.process_tree import is_tracker
from nb_accelerate.notebook.worker.server.server import Serves
from nb_accelerate.notebook.worker.stack_writer import ASK_LINE, ASK_STACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.base.seam import StoreSpec
    from nb_accelerate.notebook.protocol.messages import Call, Join, RunCell
    from nb_accelerate.notebook.ranks.end_reports import EndReports

# Seconds from SIGKILL until the process of a rank must have ended. It first frees its memory, also of a device.
_KILL_TIMEOUT = 20.0

# States of a process that computes, waits for a processor or for a disk.
_WORKING = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)

_open: weakref.WeakSet[LocalRank] = weakref.WeakSet()


def close_all_kernel_ends() -> None:
    """Close the kernel's ends of the connections of all ranks, in a process that was forked to start ranks."""
    for handle in list(_open):
        handle.close_kernel_ends()


class LocalRank(PipedRank):
    """Owns the kernel's ends of a rank's pipes and channel; see `RankEnds` for the rank's own.

    Args:
        ends: of the ranks that are started together with it.
        store: through which it meets other ranks; None if a `Join` will tell.
        store_fd: descriptor of the store that it is born with, which this closes; -1 if there is none.

    Raises:
        OSError: too many files are open. Nothing of it is left then, nor is `store_fd`.
    """

    def __init__(
        self,
        rank: int,
        *,
        local_rank: int = 0,
        ends: EndReports,
        store: StoreSpec | None = None,
        store_fd: int = -1,
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.store = store
        self.mark = new_mark()
        self.owner: Owner | None = None
        self.lost = "the process it was forked from has ended"
        self.is_lost_with_others = True
        self.closed = False
        self._is_to_end = False
        self._killed_at = float("inf")
        self._is_handed_over = False
        self._signal: Callable[[int], None] = lambda _: None
        self._asked = self._interrupts = 0
        with contextlib.ExitStack() as undo:
            if store_fd >= 0:
                undo.callback(os.close, store_fd)
            self.page = PageReader(anonymous_file())
            undo.callback(self.page.close)
            self.channel, there = Channel.pair()
            undo.callback(self.channel.close)
            undo.callback(there.close)
            self.stdout, stdout = _pipe(undo)
            self.stderr, stderr = _pipe(undo)
            self.ends = ends
            self.ends.hold()
            undo.callback(self.ends.release)
            self.stacks, stacks = (end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
            undo.pop_all()
        self._kernel_ends = self.stdout, self.stderr, self.stacks
        for fd in self._kernel_ends:
            os.set_blocking(fd, False)
        self._has_room = select.poll()
        self._has_room.register(self.stacks, select.POLLOUT)
        self._ends = RankEnds(
            control=there.detach(),
            stdout=stdout,
            stderr=stderr,
            stacks=stacks,
            page=self.page.detach(),
            store=store_fd,
        )
        _open.add(self)

    @property
    def start_fds(self) -> tuple[int, ...]:
        """Descriptors for the process that starts the rank: the write end of the status pipe, then its `RankEnds`."""
        return (self.ends.write_end, *self._ends.as_tuple())

    def handed_over(self, key: int, send_signal: Callable[[int], None], owner: Owner) -> None:
        """Note that a server starts the rank, can send it signals, and has `start_fds`, which are closed here."""
        self._close_start_fds()
        self.key, self._signal, self.owner = key, send_signal, owner

    @override
    def signal(self, signum: int) -> None:
        """Send a signal to the rank if it still runs, through its server, which knows its process."""
        if self.ended or self.closed:
            return
        if signum == signal.SIGKILL:
            self._killed_at = min(self._killed_at, time.monotonic())
        self._signal(signum)

    @override
    def ask(self, message: Call | Join | RunCell, fds: Sequence[int] = ()) -> None:
        self.channel.send(message, fds)
        self._asked += 1

    @override
    def interrupt(self) -> None:
        self._is_to_end = self._is_to_end or self.pid is None
        # Announced first, because a rank ignores a SIGINT that its page says nothing of; see `worker.interrupt`.
        self.announce_interrupt()
        self.signal(signal.SIGINT)

    def announce_interrupt(self) -> None:
        """Say to the rank that SIGINT is meant for what it was asked last."""
        if not self.closed:
            self._interrupts += 1
            self.page.interrupt(self._asked, self._interrupts)

    @override
    def processor_time(self) -> float | None:
        if self.pid is None or self.exitcode is not None:
            return 0.0
        seconds = 0.0
        with contextlib.suppress(psutil.Error):  # one has just ended
            process = psutil.Process(self.pid)
            for member in (process, *process.children(recursive=True)):
                with member.oneshot():
                    if member.status() in _WORKING:
                        return None
                    seconds += sum(member.cpu_times()[:2])  # of users' code, and of the system for it
            return seconds
        return None

    @override
    def starting(self) -> tuple[float, str]:
        owner = self.owner
        pid = self.pid or (owner.pid if owner else os.getpid())
        where = "being set up" if owner is None or owner.serves() else "importing torch"
        if self.pid is not None:
            where = "joining the process group"
        return work_of(pid), where

    @override
    def memory(self) -> int:
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(self.pid).memory_info().rss) if self.pid is not None else 0
        return 0

    @override
    def request(self, what: bytes) -> None:
        # One that has not read earlier ones is not asked again while there is still room for a `CutOff`.
        if not self.closed and (what not in (ASK_STACK, ASK_LINE) or self._has_room.poll(0)):
            with contextlib.suppress(BlockingIOError, ConnectionError):  # it has ended
                os.write(self.stacks, what)

    @override
    def terminate(self) -> None:
        self._is_to_end = self._is_to_end or self.pid is None
        self.signal(signal.SIGTERM)

    @override
    def kill(self) -> None:
        self._is_to_end = True
        self.signal(signal.SIGKILL)

    @override
    def is_lost(self) -> bool:
        if self.ended or self.owner is None:
            return False
        if self._is_to_end and not self.owner.serves():
            self.lost = f"the process it was forked from (pid {self.owner.pid}) has not begun to start ranks yet"
            return True
        since = time.monotonic() - self._killed_at
        if since > _KILL_TIMEOUT:
            self.lost = f"its process {self.pid} has not ended although it was killed ({since:.0f} s ago)"
            self.is_lost_with_others = False
        return since > _KILL_TIMEOUT

    @override
    def give_up(self) -> None:
        self.kill()
        self.ended = True
        if self.owner is not None:
            self.owner.give_up()

    @override
    def read_end(self) -> None:
        self.ended = True
        self.exitcode = self.ends.exitcodes.get(self.key)
        if self.exitcode is None and self.owner is not None and (written := self.owner.log()):
            self.lost += f". It wrote:\n{written}\n"

    @override
    def close(self) -> None:
        with interrupts_later():
            self._close_start_fds()
            self.close_kernel_ends()
        super().close()

    def close_kernel_ends(self) -> None:
        """Close the kernel's ends of its connections, in a process that was forked to start ranks."""
        if self.closed:
            return
        self.closed = True
        _open.discard(self)
        self.page.close()
        self.channel.close()
        self.ends.release()
        for fd in self._kernel_ends:
            os.close(fd)

    def _close_start_fds(self) -> None:
        with interrupts_later():
            if not self._is_handed_over:
                self._is_handed_over = True
                for fd in self._ends.as_tuple():
                    os.close(fd)


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for fd in ends:
        undo.callback(os.close, fd)
    return ends


_START_TIMEOUT = 60.0  # seconds a server has to begin to serve; later it is taken for one that never will
_OWNER_KILL_TIMEOUT = 1.0  # seconds for processes that were killed to end


class Owner:
    """The process of a server, which has forked the ranks. While it imports PyTorch, the kernel does without it.

    Args:
        serves: it takes messages at once, because it has nothing to import first.
    """

    def __init__(self, pid: int, channel: Channel, *, serves: bool = False, log: Callable[[], str] = str) -> None:
        self.pid = pid
        self.log = log
        self.is_given_up = False
        self._channel = channel
        self._serves = serves
        # Two threads that drained the channel at the same time would get a part each.
        self._reading = threading.Lock()
        self._begun = time.monotonic()

    def serves(self) -> bool:
        """Return whether it has begun to take messages."""
        with self._reading:
            if not self._serves:
                messages, _ = self._channel.drain()
                self._serves = any(isinstance(message, Serves) for message, _ in messages)
            return self._serves

    def give_up(self) -> None:
        """Start no more ranks with it: it did not report an end. One that still imports is kept for the next launch."""
        self.is_given_up = self.is_given_up or self.serves() or time.monotonic() > self._begun + _START_TIMEOUT

    def kill(self) -> None:
        """Kill it, its ranks, and all that they have started. The caller reaps it."""
        # Listed before it is killed: after that they are children of another process.
        descendants: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            descendants = psutil.Process(self.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        killed = [process for process in descendants if not is_tracker(process.pid)]
        for process in killed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(killed, _OWNER_KILL_TIMEOUT)
