"""The kernel's side of the processes that start ranks; see `notebook.worker.server.server`.

There are three kinds:

- warm (`warm_server`): a fresh interpreter with torch imported, kept between launches (``forkserver``);
- cold: a fresh interpreter with nothing imported, which starts fresh interpreters (``spawn``);
- forked (`notebook.launch.forked_server`): a fork of this process, with everything that is in memory (``fork``).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from typing import IO, TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.seam import PRELOADED
from nb_accelerate.errors import StartError
from nb_accelerate.notebook.display.frontend import is_in_kernel
from nb_accelerate.notebook.launch.local import Owner
from nb_accelerate.notebook.launch.setup import working_directory
from nb_accelerate.notebook.protocol.channel import Channel
from nb_accelerate.notebook.protocol.interrupts import interrupts_later
from nb_accelerate.notebook.protocol.messages import Quit
from nb_accelerate.notebook.worker.server.executed import LATER, StartRank
from nb_accelerate.notebook.worker.server.interpreter import command, own_path, safe_environ
from nb_accelerate.notebook.worker.server.limits import limits
from nb_accelerate.notebook.worker.server.scratch import remove_abandoned
from nb_accelerate.notebook.worker.server.server import SignalRank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nb_accelerate.base.start_methods import StartMethod
    from nb_accelerate.notebook.launch.local import LocalRank


# Modules that every rank needs, imported once in the warm server.
PRELOAD = ("torch", "torch.distributed", "cloudpickle", "tqdm.std", *PRELOADED, *LATER)

# Modules that ranks of a notebook need besides, for cells and displays. Others import them when they need them.
_PRELOAD_FOR_NOTEBOOKS = ("nb_accelerate.notebook.worker.cell",)

# The function that a fresh interpreter runs to become a server.
_ENTRY = "nb_accelerate.notebook.worker.server.executed:main"

CLOSE_TIMEOUT = 5.0  # seconds a server has to end its ranks and itself, before it is killed


class RankServer(ABC):
    """A process that starts ranks, and signals them for the kernel. Its ranks end when it does."""

    _channel: Channel

    def __init__(self) -> None:
        # Fill descriptors 0 to 2 if this process has no streams: children redirect these, and no channel may be one.
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(fd)
        self._keys = itertools.count()

    @abstractmethod
    def start(self, handles: Iterable[LocalRank]) -> None:
        """Start ranks, which then wait for `Setup`. A handle is taken when the one before is on its way."""

    def forget(self) -> None:  # noqa: B027 - most inherit nothing
        """Wait, when its ranks have ended, until no process has copies of descriptors open when they started."""

    @abstractmethod
    def close(self) -> None:
        """End the server and, if any are left, its ranks."""

    def _tell_to_quit(self) -> None:
        # Closing the channel does not suffice: a process that was forked from here meanwhile holds a copy of it.
        with contextlib.suppress(OSError):
            self._channel.send(Quit())

    def _tell(self, handle: LocalRank, key: int, owner: Owner) -> None:
        """Tell a handle that its rank is being started, and how to signal it."""
        channel = self._channel

        def send_signal(signum: int) -> None:
            with contextlib.suppress(OSError):  # it has ended, and its ranks with it
                channel.send(SignalRank(key=key, signum=signum))

        handle.handed_over(key, send_signal, owner)


class ExecutedServer(RankServer):
    """A server that is a fresh interpreter."""

    def __init__(self, preload: tuple[str, ...], *, fresh: bool = False) -> None:
        super().__init__()
        # It leaves the kernel's group when it runs, but ipykernel, at its end, waits seconds for what is in that group.
        own_group: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {}
        with contextlib.ExitStack() as undo:
            self._channel, there = Channel.pair()
            undo.callback(self._channel.close)
            with there:
                self._log: IO[bytes] = undo.enter_context(tempfile.TemporaryFile())
                with interrupts_later():
                    self._process = subprocess.Popen(
                        command(_ENTRY, [str(there.fileno()), str(os.getpid()), *preload], own_path()),
                        stdin=subprocess.DEVNULL,
                        stdout=self._log,
                        stderr=subprocess.STDOUT,
                        pass_fds=(there.fileno(),),
                        env=safe_environ(),
                        cwd=None if working_directory() else "/",  # in one that was deleted, torch cannot be imported
                        **own_group,
                    )
                    undo.pop_all()
        self.owner = Owner(self._process.pid, self._channel, log=self.log)
        self._fresh = fresh
        self._handles: list[LocalRank] = []
        self._born_with = _born_with()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def is_usable(self) -> bool:
        # Its ranks have what it was born with.
        return self.alive() and not self.owner.is_given_up and self._born_with == _born_with()

    def has_ranks(self) -> bool:
        """Return whether a launch or pool still has ranks that it has started."""
        return self.alive() and any(not (handle.ended or handle.closed) for handle in self._handles)

    def log(self) -> str:
        """Return what it wrote: nothing, unless something is wrong with it."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()

    @override
    def start(self, handles: Iterable[LocalRank]) -> None:
        self._handles = [handle for handle in self._handles if not (handle.ended or handle.closed)]
        for handle in handles:
            self._handles.append(handle)
            key = next(self._keys)
            message = StartRank(key=key, mark=handle.mark, fresh=self._fresh)
            try:
                self._channel.send(message, handle.start_fds)
            except OSError as error:
                raise StartError(f"the process that starts ranks has ended. It wrote:\n{self.log()}") from error
            self._tell(handle, key, self.owner)

    @override
    def close(self) -> None:
        # One that imports torch would not read for seconds that it is to quit.
        if self.alive() and not self.owner.serves():
            self.owner.kill()
        else:
            self._tell_to_quit()
        self._channel.close()
        try:
            self._process.wait(CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.owner.kill()
            self._process.wait()
        self._log.close()
        if self._process.returncode != 0:
            remove_abandoned()  # it could not do so itself


_READ_AT_IMPORT = ("TORCH", "PYTORCH", "TQDM_", "ATEN_", "MKL_", "KMP_", "NPY_")
_SET_BY_SKLEARN = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")  # as it is imported, for a library that it brings itself
_READ_LATER = ("TORCHELASTIC_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_", "TORCH_HOME", *_SET_BY_SKLEARN)


def _born_with() -> tuple[Any, ...]:
    """Return what a process has from its start, or reads as it imports what ranks need: limits and variables."""
    read = {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_IMPORT)}
    return limits(), {name: value for name, value in read.items() if not name.startswith(_READ_LATER)}


def new_warm_server(*, for_cells: bool = False) -> ExecutedServer:
    """Return a server with torch imported: only its first rank waits for that."""
    return ExecutedServer((*PRELOAD, *_PRELOAD_FOR_NOTEBOOKS) if for_cells or is_in_kernel() else PRELOAD)


_fork_lock = threading.Lock()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keep other threads from forking ranks inside the block: they would inherit descriptors opened for these ranks."""
    with _fork_lock:
        yield


_lock = threading.Lock()
_warm: ExecutedServer | None = None
# Warm servers that start no more ranks, and end when the ranks have ended that they have.
_retired: list[ExecutedServer] = []


def warm_server() -> ExecutedServer:
    """Return the warm server of this process; start one if there is none that can be used."""
    global _warm  # noqa: PLW0603 - one per process is what "warm" means
    with _lock:
        _retire()
        if _warm is None:
            atexit.unregister(close_warm_server)
            atexit.register(close_warm_server)
            _warm = new_warm_server()
        return _warm


def retire_warm_server() -> None:
    """End the warm server if it cannot be used any more; if other launches have ranks of it, when these have ended."""
    with _lock:
        _retire()


def _retire() -> None:
    global _warm, _retired  # noqa: PLW0603 - see above
    if _warm is not None and not _warm.is_usable():
        _retired.append(_warm)
        _warm = None
    unneeded = [server for server in _retired if not server.has_ranks()]
    _retired = [server for server in _retired if server not in unneeded]
    for server in unneeded:
        server.close()


def close_warm_server() -> None:
    """End the warm server, if there is one; the next launch starts another."""
    global _warm, _retired  # noqa: PLW0603 - see above
    with _lock:
        atexit.unregister(close_warm_server)
        servers, _retired = [*_retired, *([_warm] if _warm else [])], []
        _warm = None
        for server in servers:
            server.close()


def warm_up_for(method: StartMethod) -> None:
    """Start the warm server if ranks that come to be by this method are forked from it. Returns at once."""
    if method.forks and not method.copies_notebook and Environment().keep_warm:
        warm_server()


def _forget() -> None:
    """Forget the server and replace the locks, in a process forked from this one: they are the parent's."""
    global _warm, _retired, _lock, _fork_lock
    _warm, _retired, _lock, _fork_lock = None, [], threading.Lock(), threading.Lock()
    atexit.unregister(close_warm_server)


os.register_at_fork(after_in_child=_forget)
