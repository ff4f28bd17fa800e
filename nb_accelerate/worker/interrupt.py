"""SIGINT reaches users' code only when it is meant for it.

Interrupting a kernel sends SIGINT to its whole process group, so every rank gets it: also one that is idle, or that
belongs to another launch in the background. A rank therefore ignores SIGINT unless the kernel has put a byte into
the rank's interrupt pipe first, and users' code is running.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


class InterruptGate:
    """Decides what a SIGINT means. Make it in the main thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._open = False
        os.set_blocking(fd, False)
        signal.signal(signal.SIGINT, self._on_signal)
        # The parent blocks it while a rank is born, so that it cannot end the rank before this line.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """While inside, an interrupt raises KeyboardInterrupt."""
        self._requested()  # one that came too late for the call before
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        # A forked child of this rank, such as a loader's worker, has this handler and the same pipe: the byte is
        # not for it. It ends when the rank does.
        if os.getpid() == self._pid and self._requested() and self._open:
            raise KeyboardInterrupt

    def _requested(self) -> bool:
        try:
            return bool(os.read(self._fd, 64))
        except BlockingIOError:
            return False
