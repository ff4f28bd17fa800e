"""The kernel's side of the warm process that ranks are forked from; see `nb_accelerate.worker.server`."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from typing import IO, TYPE_CHECKING

from nb_accelerate.errors import StartError
from nb_accelerate.protocol.channel import Channel
from nb_accelerate.worker.server import SignalRank, StartRank

if TYPE_CHECKING:
    from nb_accelerate.launch.handle import RankHandle

PRELOAD = ("torch", "torch.distributed")
"""What every rank needs, imported once."""

_BOOTSTRAP = "from nb_accelerate.worker.server import main; main()"


class ForkServer:
    """A process that forks ranks. Start it once and keep it: the first rank waits for torch, later ones do not."""

    def __init__(self, preload: tuple[str, ...] = PRELOAD) -> None:
        self._channel, there = Channel.pair()
        self._keys = itertools.count()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        environ = dict(os.environ)
        # The kernel's path as it is now: nb_accelerate may have been found by a sys.path that only the kernel has.
        environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        environ.pop("PYTHONSTARTUP", None)
        # Blocked in the child too, until it ignores SIGINT: an interrupt of the cell must not end it half-started.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(there.fileno()), str(os.getpid()), *preload],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(there.fileno(),),
                env=environ,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
            there.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Does it run?"""
        return self._process.poll() is None

    def log(self) -> str:
        """What it wrote: nothing, unless it could not start."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()

    def start(self, handle: RankHandle) -> None:
        """Fork a rank; it then waits for `Setup` on the handle's channel.

        Raises:
            StartError: the server is gone.
        """
        key = next(self._keys)
        try:
            self._channel.send(StartRank(key=key, mark=handle.mark), handle.birth_fds)
        except OSError as error:
            handle.born(lambda _: None)
            raise StartError(f"the process that starts ranks has ended. It wrote:\n{self.log()}") from error
        handle.born(lambda signum: self._signal(key, signum))

    def _signal(self, key: int, signum: int) -> None:
        if self.alive():
            self._channel.send(SignalRank(key=key, signum=signum))

    def close(self) -> None:
        """End the server and, if any are left, its ranks."""
        self._channel.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


_lock = threading.Lock()
_warm: ForkServer | None = None


def warm_server() -> ForkServer:
    """The server of this process, started if there is none."""
    global _warm  # noqa: PLW0603 - one per process is what "warm" means
    with _lock:
        if _warm is not None and not _warm.alive():
            _warm.close()
            _warm = None
        if _warm is None:
            _warm = ForkServer()
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


def _forget() -> None:
    """In a process forked from this one: the server is the parent's, and so is its lock."""
    global _warm, _lock
    _warm, _lock = None, threading.Lock()
    atexit.unregister(close_warm_server)


os.register_at_fork(after_in_child=_forget)
