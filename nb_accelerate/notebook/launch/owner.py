"""The process of a server, as its ranks see it: whether it answers yet, and its end with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import psutil

from nb_accelerate.notebook.worker.server.process_tree import is_tracker
from nb_accelerate.notebook.worker.server.server import Serves

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.protocol.channel import Channel

_START_TIMEOUT = 60.0  # seconds a server has to begin to serve; later it is taken for one that never will
_KILL_TIMEOUT = 1.0  # seconds for processes that were killed to end


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
        descendants: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            descendants = psutil.Process(self.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        killed = [process for process in descendants if not is_tracker(process.pid)]
        for process in killed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(killed, _KILL_TIMEOUT)
