"""SIGINT reaches users' code only when it is meant for it.

Interrupting a kernel sends SIGINT to its whole process group, so every rank gets it: also one that is idle, or that
belongs to another launch in the background. A rank therefore ignores SIGINT unless the kernel has said before, in the
rank's interrupt pipe, what it interrupts: the number of a call or cell, counted from the rank's start by both sides.
One that has not begun yet is interrupted as it begins, and one that has ended is not mistaken for the next. Since the
number is taken once, the kernel may send the signal again: the first can come just before Python begins to wait for
something, and would then be noticed when that comes.

Where an event loop is at work, between two steps of tasks, the exception waits for the loop's next round. Raised at
once, it could hit just when a task's next step is put into the queue or taken out of it, and that task would never
go on, not even to be cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
from typing import TYPE_CHECKING

from nb_accelerate.worker.ends import NUMBER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


_RUNS_A_STEP = asyncio.Handle._run.__code__  # noqa: SLF001 - what all that a loop calls is called from


def _is_of_event_loop(frame: FrameType | None) -> bool:
    """Is an event loop itself at work, and not something that it has called?"""
    outer = frame
    while outer is not None:
        code = outer.f_code
        is_library = str(outer.f_globals.get("__name__")).startswith("asyncio.")
        if is_library and not code.co_flags & inspect.CO_COROUTINE:  # coroutines of it are parts of tasks
            return outer is frame or code is not _RUNS_A_STEP
        outer = outer.f_back
    return False


class InterruptGate:
    """Decides what a SIGINT means. Make it in the main thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._open = False
        self._opened = 0
        self._interrupted = 0
        os.set_blocking(fd, False)
        signal.signal(signal.SIGINT, self._on_signal)
        # The parent blocks it while a rank is born, so that it cannot end the rank before this line.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """While inside, which is once for each call or cell, an interrupt raises KeyboardInterrupt."""
        self._opened += 1
        self._open = True
        try:
            if self._is_meant():
                raise KeyboardInterrupt
            yield
        finally:
            self._open = False

    def _on_signal(self, _signum: int, frame: FrameType | None) -> None:
        # A forked child of this rank, such as a loader's worker, has this handler and the same pipe: the number is
        # not for it. It ends when the rank does.
        if os.getpid() != self._pid or not self._is_meant():
            return
        loop = asyncio._get_running_loop()  # noqa: SLF001 - as get_running_loop, with None in place of an error
        if loop is not None and _is_of_event_loop(frame):
            loop.call_soon_threadsafe(self._interrupt, self._opened)
        else:
            raise KeyboardInterrupt

    def _interrupt(self, opened: int) -> None:
        if self._open and opened == self._opened:
            raise KeyboardInterrupt

    def _is_meant(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            told = os.read(self._fd, 16 * NUMBER.size)
            if told:
                (self._interrupted,) = NUMBER.unpack(told[-NUMBER.size :])
        if not self._open or self._interrupted != self._opened:
            return False
        self._interrupted = 0
        return True
