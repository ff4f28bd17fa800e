"""The process that ranks are forked from: warm, single-threaded, and without anything of the notebook's in it.

::

    kernel ---- control channel ----> server ---- fork ----> rank
       |   StartRank + descriptors      |                      |
       |   SignalRank, Quit             | waits for its        | talks to the kernel over
       |                                | children             | its own descriptors
       <---- exit status, by a pipe ----+                      |
       <----------------------------- channel, output ---------+

The server imports torch once; a rank forked from it starts in milliseconds, with none of the kernel's threads,
locks, sockets or CUDA state. A few idle processes, as many as the last launches had ranks, are forked beforehand. The
server answers nothing on the control channel but that it quits: a rank speaks for itself, and its end is told by eight
bytes in a pipe of its own.

Who dies with whom: the server ends when the kernel does (it waits for the kernel's process descriptor, and for the
end of the channel; while it imports, a thread does), and kills its ranks first. Ranks end when the server does
(parent-death signal). What a rank leaves behind, a loader's workers say, is adopted by the server and killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import struct
import sys
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, NoReturn

from nb_accelerate.protocol.channel import Channel
from nb_accelerate.protocol.messages import Quit
from nb_accelerate.worker.ends import RankEnds
from nb_accelerate.worker.inheritance import forget_parent
from nb_accelerate.worker.lineage import adopt_orphans, children, die_with_parent, ending_with, has_others, set_name
from nb_accelerate.worker.rank import run_rank
from nb_accelerate.worker.scratch import Scratch, remove_abandoned

EXIT_STATUS = struct.Struct("!q")
"""What is written to the pipe of a rank that ended: exit code, or minus the signal's number."""


@dataclass(frozen=True, kw_only=True)
class StartRank:
    """Fork a rank. Comes with the write end of its status pipe, then its `RankEnds`.

    Attributes:
        key: names the rank in `SignalRank`.
        mark: mark of its output frames.
        fresh: start a fresh interpreter and not a fork of the server.
    """

    key: int
    mark: bytes
    fresh: bool = False


@dataclass(frozen=True, kw_only=True)
class SignalRank:
    """Send a signal to a rank, if it still runs."""

    key: int
    signum: int


_QUIET = 0.002
"""Seconds without anything to do after which there is time to fork an idle process."""

LATER = ("torch._dynamo",)
"""Imports that can wait, a second of them: the first optimizer asks for it. If somebody waits for ranks already when
the rest is imported, these get it by themselves when they need it, and the server once nobody waits."""

_PAUSE = 0.5
"""Seconds without anything to do after which there is time for that."""

_MOST_IDLE = 8


@dataclass
class _Rank:
    key: int
    status_fd: int


def serve(control_fd: int, parent: int, preload: tuple[str, ...]) -> NoReturn:
    """Be the server until the kernel ends or closes the channel.

    Args:
        control_fd: this end of the control channel.
        parent: process id of the kernel.
        preload: modules to import first. One that fails is reported by every rank that is started.
    """
    _Server(Channel.from_fd(control_fd), parent, preload).run()


class _Server:
    def __init__(
        self,
        control: Channel,
        parent: int,
        preload: tuple[str, ...] = (),
        inherited: tuple[Any, Any, Any] | None = None,
    ) -> None:
        self._control = control
        self._parent = parent
        self._inherited = inherited
        self._ranks: dict[int, _Rank] = {}
        self._idle: dict[int, Channel] = {}
        # A server that serves one launch, or starts fresh interpreters, has nothing to gain.
        self._keeps_idle = bool(preload)
        self._wanted = 2 if self._keeps_idle else 0
        self._adopts = adopt_orphans()
        self._selector = selectors.DefaultSelector()
        self._own_fds: list[int] = []
        self._scratch = Scratch()
        self._broken = self._import(tuple(module for module in preload if module not in LATER))
        self._later = tuple(module for module in preload if module in LATER)
        if self._later and not self._is_waited_for():
            self._import_later()
        self._freeze()

    def _is_waited_for(self) -> bool:
        return bool(wait([self._control.fileno()], 0))

    def _import_later(self) -> None:
        modules, self._later = self._later, ()
        self._broken = self._broken or self._import(modules)

    def _import(self, modules: tuple[str, ...]) -> BaseException | None:
        if not modules:
            return None
        with ending_with(self._parent):  # it takes seconds, and nobody else looks meanwhile
            return _import_all(modules)

    def _freeze(self) -> None:
        """What is alive now stays alive: keep the collector from touching, and so copying, its pages in every rank."""
        if self._keeps_idle:
            gc.collect()
        gc.freeze()

    def run(self) -> NoReturn:
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
        if self._inherited is not None:
            self._fork_idle()  # while the kernel makes the first rank's descriptors
        remove_abandoned()
        while os.getppid() == self._parent:
            has_time = not self._ranks and (self._later or len(self._idle) < self._wanted)
            events = self._selector.select((_PAUSE if self._later else _QUIET) if has_time else None)
            if not events and self._later:
                self._import_later()
                self._freeze()
            elif not events:
                self._fork_idle()
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

    def _read_control(self) -> bool:
        messages, is_open = self._control.drain()
        for message, fds in messages:
            if isinstance(message, StartRank):
                self._start(message, fds)
            elif isinstance(message, Quit):
                return False
            elif isinstance(message, SignalRank):
                for pid, rank in self._ranks.items():
                    if rank.key == message.key:
                        os.kill(pid, message.signum)
        return is_open

    def _start(self, message: StartRank, fds: tuple[int, ...]) -> None:
        status_fd, *rank_fds = fds
        if not self._idle:
            self._fork_idle()
        pid, channel = self._idle.popitem()
        scratch = self._scratch.make(str(message.key))
        with contextlib.suppress(OSError):  # it has just been killed; its end is told like any other's
            channel.send((message, scratch), rank_fds)
        channel.close()
        for fd in rank_fds:
            os.close(fd)
        self._ranks[pid] = _Rank(message.key, status_fd)
        if self._keeps_idle:
            self._wanted = min(_MOST_IDLE, max(self._wanted, len(self._ranks)))

    def _fork_idle(self) -> None:
        """Fork a process that waits to be made a rank: a large process takes ten milliseconds to fork."""
        channel, there = Channel.pair()
        server = os.getpid()
        # Blocked until the rank has its own handler, or an interrupt in between would be Python's, and deadly.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pid = os.fork()
        if pid == 0:
            try:
                channel.close()
                self._become_child()
                self._wait_to_be_a_rank(Channel(there), server)
            finally:
                os._exit(70)  # os.EX_SOFTWARE; only reached if the rank could not even say what went wrong
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        there.close()
        self._idle[pid] = channel

    def _wait_to_be_a_rank(self, channel: Channel, server: int) -> NoReturn:
        set_name("nb-idle")
        die_with_parent(server)
        try:
            (message, scratch), fds = channel.recv()
        except EOFError:
            os._exit(0)
        channel.close()
        ends = RankEnds.from_tuple(fds)
        if message.fresh:
            _exec_rank(ends, message.mark, server, scratch)
        run_rank(ends, message.mark, server, scratch=scratch, inherited=self._inherited, broken=self._broken)

    def _become_child(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._control.close()
        self._scratch.leave()
        for fd in self._own_fds:
            os.close(fd)
        for channel in self._idle.values():
            channel.close()
        for rank in self._ranks.values():
            os.close(rank.status_fd)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._idle:  # somebody killed it
                self._idle.pop(pid).close()
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                self._tell_end(rank, status)

    def _tell_end(self, rank: _Rank, status: int) -> None:
        # A rank that left in good order has ended its own children, or left some behind on purpose. One that was killed
        # has not. All are to be gone once its launch returns, which waits for its last rank.
        if status != 0 or not self._ranks:
            self._kill_adopted()
        self._scratch.remove(str(rank.key))
        with contextlib.suppress(BrokenPipeError):
            os.write(rank.status_fd, EXIT_STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(rank.status_fd)

    def _kill_adopted(self) -> None:
        """End what ranks left behind."""
        while self._adopts and has_others({*self._ranks, *self._idle}):
            orphans = [pid for pid in children() if pid not in self._ranks and pid not in self._idle]
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
            for pid in orphans:  # their own children come to us next
                os.waitpid(pid, 0)
            if not orphans:
                return

    def _end(self) -> NoReturn:
        for pid in (*self._ranks, *self._idle):
            os.kill(pid, signal.SIGKILL)
        for pid in (*self._ranks, *self._idle):
            os.waitpid(pid, 0)
        for rank in self._ranks.values():
            self._scratch.remove(str(rank.key))
        self._ranks.clear()
        self._idle.clear()
        self._kill_adopted()
        with contextlib.suppress(OSError):  # the kernel has gone
            self._control.send(Quit())
        os._exit(0)


def _import_all(modules: tuple[str, ...]) -> BaseException | None:
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            return error
    return None


def _exec_rank(ends: RankEnds, mark: bytes, server: int, scratch: str) -> NoReturn:
    """Go on as a fresh interpreter with the same descriptors. SIGINT stays blocked until it has a handler."""
    for fd in ends.as_tuple():
        os.set_inheritable(fd, True)
    code = "from nb_accelerate.worker.server import fresh_rank; fresh_rank()"
    arguments = [mark.hex(), str(server), scratch, *map(str, ends.as_tuple())]
    os.execv(sys.executable, [sys.executable, "-c", code, *arguments])  # noqa: S606 - no shell is what we want


def fresh_rank() -> NoReturn:
    """Entry of the interpreter that `_exec_rank` starts."""
    mark, server, scratch, *fds = sys.argv[1:]
    for fd in fds:
        os.set_inheritable(int(fd), False)
    run_rank(RankEnds.from_tuple(tuple(map(int, fds))), bytes.fromhex(mark), int(server), scratch=scratch)


def serve_forked(control_fd: int, parent: int, call: tuple[Any, Any, Any]) -> NoReturn:
    """Be the server in a process that was just forked from a kernel. SIGINT is blocked.

    Nothing of the kernel's may be used from here on: its streams, its event loop, its exit handlers.
    """
    try:
        set_name("nb-server")
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        os.close(nothing)
        forget_parent()
        _Server(Channel.from_fd(control_fd), parent, inherited=call).run()
    finally:
        os._exit(70)


def main() -> NoReturn:
    """Entry of ``python -c`` with the arguments of `serve` on the command line."""
    set_name("nb-server")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the kernel's group is not for us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the kernel blocked it until this line
    control_fd, parent, *preload = sys.argv[1:]
    serve(int(control_fd), int(parent), tuple(preload))
