"""Watch the process of a server: whether it answers, and if not, why.

It may have been stopped (SIGSTOP), or still import PyTorch. The kernel then does without it: it knows its process and
those of the ranks, and ends them by itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

import psutil

from nb_accelerate.notebook.worker.server.process_tree import is_tracker, open_process, send_signal
from nb_accelerate.notebook.worker.server.server import Serves

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.protocol.channel import Channel

_START_TIMEOUT = 60.0
"""Seconds a server has to begin to serve; later it is taken for one that never will."""

_KILL_TIMEOUT = 1.0
"""Seconds for processes that were killed to end."""


class Owner:
    """The process of a server, which has forked the ranks.

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
        self._process = open_process(pid)

    def serves(self) -> bool:
        """Return whether it has begun to take messages."""
        with self._reading:
            if not self._serves:
                messages, _ = self._channel.drain()
                self._serves = any(isinstance(message, Serves) for message, _ in messages)
            return self._serves

    def is_stopped(self) -> bool:
        """Return whether it is stopped, as by SIGSTOP."""
        return is_stopped(self.pid)

    def silence(self) -> str:
        """Return why it cannot answer now, as the end of a sentence; "" if it can, or has ended."""
        if self.is_stopped():
            return f"is stopped (SIGSTOP). To let it go on: kill -CONT {self.pid}"
        return "" if self.serves() else "has not begun to start ranks yet"

    def give_up(self) -> None:
        """Start no more ranks with it: it did not report an end. One that still imports is kept for the next launch."""
        begins = not self.serves() and time.monotonic() < self._begun + _START_TIMEOUT
        self.is_given_up = self.is_given_up or self.is_stopped() or not begins

    def kill(self) -> None:
        """Kill it, its ranks, and all that they have started. The caller reaps it."""
        descendants: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            descendants = psutil.Process(self.pid).children(recursive=True)
        send_signal(self.pid, signal.SIGKILL, process=self._process)
        ending = set()
        for process in descendants:
            if not is_tracker(process.pid):
                with contextlib.suppress(psutil.Error):
                    process.kill()
                    ending.add(open_process(process.pid))
        ending.discard(-1)
        left, deadline = set(ending), time.monotonic() + _KILL_TIMEOUT
        while left and (ended := wait(left, max(0.0, deadline - time.monotonic()))):
            left.difference_update(ended)
        for descriptor in ending:
            os.close(descriptor)

    def close(self) -> None:
        """Close its descriptor, when it has been reaped."""
        if self._process >= 0:
            os.close(self._process)
            self._process = -1


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP."""
    try:
        return bool(_process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


@functools.lru_cache(maxsize=1024)
def _process(pid: int) -> psutil.Process:
    """Return a process, for its status: to make the object reads as much of ``/proc`` as to ask it.

    Not for signals: another process may have this id by now.
    """
    return psutil.Process(pid)
