"""The kernel's side of the processes that ranks are forked from; see `nb_accelerate.worker.server`.

Three births, one way of working afterwards:

- warm (`warm_server`): a fresh interpreter with torch imported, kept between launches (``forkserver``);
- cold (`ColdServer`): a fresh interpreter with nothing imported, which starts fresh interpreters (``spawn``);
- forked (`ForkedServer`): a fork of this process, with everything that is in memory (``fork``).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import IO, TYPE_CHECKING, Any

import psutil
from typing_extensions import override

from nb_accelerate.errors import StartError
from nb_accelerate.protocol.channel import Channel
from nb_accelerate.protocol.messages import Quit
from nb_accelerate.worker.server import LATER, SignalRank, StartRank, serve_forked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nb_accelerate.launch.handle import RankHandle

PRELOAD = (
    "torch",
    "torch.distributed",
    "cloudpickle",
    "tqdm.std",
    "nb_accelerate.accelerator",
    "nb_accelerate.worker.cell",
    *LATER,
)
"""What every rank needs, imported once in the warm server."""

_BOOTSTRAP = "from nb_accelerate.worker.server import main; main()"
_CLOSING = 5.0
"""Seconds a server has to end its ranks and itself."""


class RankServer(ABC):
    """Starts ranks, signals them, and ends with them."""

    fresh = False
    """Ranks are fresh interpreters."""

    inherits_call = False
    """Ranks have the function in memory, so it is not sent to them."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._keys = itertools.count()

    @property
    @abstractmethod
    def pid(self) -> int:
        """Its process id."""

    @abstractmethod
    def alive(self) -> bool:
        """Does it run?"""

    @abstractmethod
    def log(self) -> str:
        """What it wrote: nothing, unless something is wrong with it."""

    @abstractmethod
    def close(self) -> None:
        """End the server and, if any are left, its ranks."""

    def start(self, handle: RankHandle) -> None:
        """Start a rank; it then waits for `Setup` on the handle's channel.

        Raises:
            StartError: the server is gone.
        """
        key = next(self._keys)
        try:
            message = StartRank(key=key, mark=handle.mark, fresh=self.fresh)
            self._channel.send(message, handle.birth_fds)
        except OSError as error:
            handle.born(lambda _: None)
            raise StartError(f"the process that starts ranks has ended. It wrote:\n{self.log()}") from error
        handle.born(lambda signum: self._signal(key, signum))

    def _tell_to_quit(self) -> None:
        # Said and not left to the end of the channel: a process that was forked from here meanwhile holds a copy.
        with contextlib.suppress(OSError):
            self._channel.send(Quit())

    def _signal(self, key: int, signum: int) -> None:
        with contextlib.suppress(OSError):  # it has ended, and its ranks with it
            self._channel.send(SignalRank(key=key, signum=signum))


class _ExecutedServer(RankServer):
    """A fresh interpreter."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        channel, there = Channel.pair()
        super().__init__(channel)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        environ = dict(os.environ)
        # The kernel's path as it is now: nb_accelerate may have been found by a sys.path that only the kernel has.
        environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with _sigint_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(there.fileno()), str(os.getpid()), *preload],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(there.fileno(),),
                env=environ,
            )
        there.close()

    @property
    @override
    def pid(self) -> int:
        return self._process.pid

    @override
    def alive(self) -> bool:
        return self._process.poll() is None

    @override
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()

    @override
    def close(self) -> None:
        self._tell_to_quit()
        self._channel.close()
        try:
            self._process.wait(_CLOSING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class WarmServer(_ExecutedServer):
    """Has torch imported. Start it once and keep it: the first rank waits for the import, later ones do not."""

    def __init__(self) -> None:
        super().__init__(PRELOAD)


class ColdServer(_ExecutedServer):
    """Has nothing imported; its ranks are fresh interpreters. For one launch."""

    fresh = True

    def __init__(self) -> None:
        super().__init__(())


class ForkedServer(RankServer):
    """A fork of this process, for one launch. Its ranks have everything that is in memory here.

    The server stands between this process and the ranks so that they are owned, watched and cleaned up as others
    are, and by a thread that lives as long as they do.
    """

    inherits_call = True

    def __init__(self, call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> None:
        importlib.import_module("tqdm.std")  # every rank wants it: here once, and not in each of them

        channel, there = Channel.pair()
        super().__init__(channel)
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # what is in a buffer now would be in the child's too
        with _sigint_blocked():
            self._pid = os.fork()
            if self._pid == 0:
                channel.close()
                serve_forked(there.detach(), parent, call)
        there.close()
        self._ended = False

    @property
    @override
    def pid(self) -> int:
        return self._pid

    @override
    def alive(self) -> bool:
        if not self._ended:
            self._ended = os.waitpid(self._pid, os.WNOHANG)[0] != 0
        return not self._ended

    @override
    def log(self) -> str:
        return ""

    @override
    def close(self) -> None:
        if self._ended:
            self._channel.close()
            return
        self._tell_to_quit()
        # It answers when none of its ranks is left. After that it has only its copy of this process' memory to give
        # back, which takes longer the larger it is: nobody need wait for that.
        while not wait([self._channel.fileno()], _CLOSING) and self.alive():
            pass
        self._channel.close()
        if self._ended:
            return
        threading.Thread(target=os.waitpid, args=(self._pid, 0), name="nb_accelerate-reaper", daemon=True).start()
        self._ended = True


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """An interrupt of the cell must not end a child before it has said what SIGINT means to it."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


_lock = threading.Lock()
_warm: WarmServer | None = None


def warm_server() -> WarmServer:
    """The warm server of this process, started if there is none."""
    global _warm  # noqa: PLW0603 - one per process is what "warm" means
    with _lock:
        if _warm is not None and not _warm.alive():
            _warm.close()
            _warm = None
        if _warm is None:
            _warm = WarmServer()
            atexit.register(close_warm_server)
        return _warm


def close_warm_server() -> None:
    """End the warm server, if there is one; the next launch starts another."""
    global _warm  # noqa: PLW0603 - see above
    with _lock:
        if _warm is not None:
            atexit.unregister(close_warm_server)
            _warm.close()
            _warm = None


close = close_warm_server
"""Its public name, in the package."""


def warm_up() -> None:
    """Start the process that ranks are forked from, in the background: the first launch then need not wait for it."""
    warm_server()


@dataclass(frozen=True, kw_only=True)
class WarmStatus:
    """What stays between launches.

    Attributes:
        pid: the warm server's process.
        idle: process ids of the idle processes it keeps.
        memory: bytes that all of them have to themselves.
    """

    pid: int
    idle: tuple[int, ...]
    memory: int

    def __str__(self) -> str:
        return (
            f"warm server {self.pid} with {len(self.idle)} idle processes, {self.memory / 2**20:.0f} MiB; "
            f"nb_accelerate.launch.close() ends it, NB_ACCELERATE_KEEP_WARM=0 keeps none"
        )


def warm_status() -> WarmStatus | None:
    """What this process keeps between launches, or None if there is nothing."""
    with _lock:
        if _warm is None or not _warm.alive():
            return None
        server = psutil.Process(_warm.pid)
        idle, memory = [], server.memory_full_info().uss
        for child in server.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if child.name() == "nb-idle":
                    memory += child.memory_full_info().uss
                    idle.append(child.pid)
        return WarmStatus(pid=server.pid, idle=tuple(idle), memory=memory)


def _forget() -> None:
    """In a process forked from this one: the server is the parent's, and so is the lock."""
    global _warm, _lock
    _warm, _lock = None, threading.Lock()
    atexit.unregister(close_warm_server)


os.register_at_fork(after_in_child=_forget)
