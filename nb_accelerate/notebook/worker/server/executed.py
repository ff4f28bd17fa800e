"""A server that is a fresh interpreter, and starts ranks when the kernel tells it to.

It imports torch once; a rank forked from it starts in milliseconds, with none of the kernel's threads, locks, sockets
or CUDA state. A few idle processes, as many as the last launches had ranks, are forked beforehand. A server that
imports nothing starts ranks that are fresh interpreters themselves. So does one whose imports have failed: each rank
then imports what it needs, and no rank fails by what it does not need, or by a module that was left half imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import override

from nb_accelerate.base.helper_threads import tell_failures
from nb_accelerate.base.imported import imported
from nb_accelerate.base.seam import PRELOADED_LATER
from nb_accelerate.notebook.protocol.channel import Channel
from nb_accelerate.notebook.protocol.messages import RankEnds
from nb_accelerate.notebook.protocol.random_states import RandomStates
from nb_accelerate.notebook.protocol.settings import note_fresh
from nb_accelerate.notebook.worker.rank import patch_libraries, prepare_process, run_rank
from nb_accelerate.notebook.worker.server.interpreter import command
from nb_accelerate.notebook.worker.server.process_tree import die_with_parent, ending_with, join_group_of, set_name
from nb_accelerate.notebook.worker.server.scratch import Scratch, remove_abandoned
from nb_accelerate.notebook.worker.server.server import Server, Serves, refuse_rank

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True, kw_only=True)
class StartRank:
    """Fork a rank, or start a fresh interpreter. Comes with the write end of its status pipe, then its `RankEnds`."""

    key: int
    mark: bytes
    fresh: bool = False


_FORK_AFTER = 0.002  # seconds without a message or an ended child after which an idle process is forked

# Modules that the first optimizer of a rank imports, and the first checkpoint of a sharded model; each takes a second.
# The server imports them at once only if no launch waits for ranks then; those ranks import them by themselves.
LATER = ("torch._dynamo", *PRELOADED_LATER)

_IMPORT_AFTER = 0.5  # seconds without a message or an ended child, and without ranks, after which `LATER` is imported
_MAX_IDLE = 8  # idle processes that are kept, at most


class _ExecutedServer(Server):
    """Forks a rank for each `StartRank`."""

    def __init__(self, control: Channel, parent: int, preload: tuple[str, ...]) -> None:
        super().__init__(control, parent, Scratch())
        self._idle: dict[int, Channel] = {}
        # Nothing is gained by forking a process beforehand that becomes a fresh interpreter.
        self._keeps_idle = bool(preload)
        self._wanted = 2 if self._keeps_idle else 0
        self._has_failed = not self._import(tuple(module for module in preload if module not in LATER))
        self._later = tuple(module for module in preload if module in LATER)
        if wait([self._control.fileno()], 0):  # for ranks
            gc.freeze()  # with what the imports have left over, which is collected when there is time
        else:
            self._import_later()
            self._freeze()
        remove_abandoned()
        with contextlib.suppress(OSError):  # the kernel has gone
            control.send(Serves())

    def _import_later(self) -> None:
        modules, self._later = self._later, ()
        self._has_failed = self._has_failed or not self._import(modules)

    def _import(self, modules: tuple[str, ...]) -> bool:
        """Import modules, and return whether all could be imported. Who needs one that could not learns why."""
        if not modules:
            return True
        gc.disable()  # it would walk again and again through all that is being defined, for a sixth of torch's import
        try:
            with ending_with(self._parent):  # it takes seconds, and nobody else watches the kernel meanwhile
                for module in modules:
                    importlib.import_module(module)
                if imported("numpy") is not None:  # torch imports it, if it is there
                    importlib.import_module("numpy.random")  # NumPy does that when it is used: in each rank, for 10 ms
                if imported("torch") is not None and sys.platform != "darwin":  # it starts Metal: no fork survives that
                    RandomStates.here().use()  # torch's seeding reads its own sources first, as long in each rank
                patch_libraries()
                # Packages may be installed from now on; a rank lists the folders when it imports something. In each
                # idle process this would take longer than all else.
                importlib.invalidate_caches()
                note_fresh()
        except Exception:
            return False
        finally:
            gc.enable()
        return True

    def _freeze(self) -> None:
        """Keep the collector from touching, and so copying, pages in every rank: what is alive now stays alive."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    @override
    def _pause(self) -> float | None:
        if self._ranks:
            return None
        if len(self._idle) < self._wanted:
            return _FORK_AFTER
        return _IMPORT_AFTER if self._later else None

    @override
    def _use_pause(self) -> None:
        if len(self._idle) < self._wanted:
            try:
                self._fork_idle()
            except OSError:  # no room for it; the next request for a rank reports it
                self._wanted = len(self._idle)
            return
        self._import_later()
        self._freeze()
        while self._idle:  # they were forked without these imports
            _, channel = self._idle.popitem()
            channel.close()

    @override
    def _take(self, message: Any, fds: tuple[int, ...]) -> None:
        if isinstance(message, StartRank):
            self._start(message, fds)

    def _start(self, message: StartRank, fds: tuple[int, ...]) -> None:
        status_fd, *rank_fds = fds
        try:
            if not self._idle:
                self._fork_idle()
            scratch = self._scratch.make(str(message.key))
        except OSError as error:
            refuse_rank(message.key, status_fd, rank_fds, error)
            self._scratch.remove(str(message.key))
            for fd in rank_fds:
                os.close(fd)
            return
        pid, channel = self._idle.popitem()
        with contextlib.suppress(OSError):  # it has just been killed; its end is told like any other's
            channel.send((message, scratch), rank_fds)
        channel.close()
        for fd in rank_fds:
            os.close(fd)
        self.own(pid, message.key, status_fd)
        if self._keeps_idle:
            self._wanted = min(_MAX_IDLE, max(self._wanted, len(self._ranks)))

    def _fork_idle(self) -> None:
        """Fork a process that waits to become a rank; ten milliseconds for a large one. Raises OSError without room."""
        random = imported("numpy.random")
        if random is not None:
            random.seed()  # or all ranks would have the state that was made when it was imported
        channel, there = Channel.pair()
        server = os.getpid()
        # Blocked until the rank has its own handler, or an interrupt in between would be Python's, and deadly.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            channel.close()
            there.close()
            raise
        if pid == 0:
            try:
                channel.close()
                self._leave_server()
                self._wait_to_be_a_rank(Channel(there), server)
            finally:
                os._exit(70)  # os.EX_SOFTWARE; only reached if the rank could not even say what went wrong
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        there.close()
        self._idle[pid] = channel

    def _leave_server(self) -> None:
        """Close, in a child, what belongs to the server, and join the kernel's process group."""
        join_group_of(self._parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, self._hangup)
        self._selector.close()
        self._control.close()
        self._scratch.leave()
        for fd in self._own_fds:
            os.close(fd)
        for channel in self._idle.values():
            channel.close()
        for rank in self._ranks.values():
            os.close(rank.status_fd)

    def _wait_to_be_a_rank(self, channel: Channel, server: int) -> NoReturn:
        set_name("nb-idle")
        die_with_parent(server)
        broken = None if self._has_failed else prepare_process(is_fork=False, is_patched=True)
        try:
            (message, scratch), fds = channel.recv()
        except EOFError:
            os._exit(0)
        channel.close()
        ends = RankEnds.from_tuple(fds)
        if message.fresh or self._has_failed:
            _exec_rank(ends, message.mark, server, scratch)
        run_rank(ends, message.mark, server, scratch=scratch, broken=broken)

    @override
    def _spare(self) -> Collection[int]:
        return self._idle.keys()

    @override
    def _tidy(self) -> None:
        # PyTorch before 2.10 makes a folder as it is imported, and no exit handlers run here.
        folder = getattr(imported("torch.distributed.nn.jit.instantiator"), "_TEMP_DIR", None)
        if folder is not None:
            folder.cleanup()

    @override
    def _has_ended(self, pid: int) -> None:
        if pid in self._idle:  # somebody killed it
            self._idle.pop(pid).close()


def _exec_rank(ends: RankEnds, mark: bytes, server: int, scratch: str) -> NoReturn:
    """Replace this process by a fresh interpreter with the same descriptors. SIGINT is blocked until that is ready."""
    for fd in ends.as_tuple():
        os.set_inheritable(fd, True)
    arguments = [mark.hex(), str(server), scratch, *map(str, ends.as_tuple())]
    words = command("nb_accelerate.notebook.worker.server.executed:fresh_rank", arguments, sys.path)
    os.execv(sys.executable, words)  # noqa: S606 - no shell is what we want


def fresh_rank() -> NoReturn:
    """Run a rank in the interpreter that `_exec_rank` starts, as its command line says."""
    mark, server, scratch, *fds = sys.argv[1:]
    for fd in fds:
        os.set_inheritable(int(fd), False)
    ends = RankEnds.from_tuple(tuple(map(int, fds)))
    broken = prepare_process(is_fork=False)
    run_rank(ends, bytes.fromhex(mark), int(server), scratch=scratch, broken=broken)


def _end_with_traceback(_: str, error: BaseException) -> NoReturn:
    """End a server one of whose threads has failed. The kernel quotes what it writes."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(os.EX_SOFTWARE)


def main() -> NoReturn:
    """Run the server. The command line has a descriptor, the kernel's process id, and the modules to import."""
    set_name("nb-server")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the kernel's group is not for us
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the kernel blocked it until this line; the user may have others
    tell_failures(_end_with_traceback)
    control_fd, parent, *preload = sys.argv[1:]
    _ExecutedServer(Channel.from_fd(int(control_fd)), int(parent), tuple(preload)).run()
