"""Let SIGINT reach users' code only when it is meant for it.

Interrupting a kernel sends SIGINT to its whole process group, so every rank gets it: also one that is idle, or that
belongs to another launch in the background. A rank therefore ignores SIGINT unless the kernel has said before, on the
rank's progress page, what it interrupts: the number of a call or cell, counted from the rank's start by both sides.
One that has not begun yet is interrupted as it begins, and one that has ended is not mistaken for the next.

A signal that comes just before Python begins to wait for something would be noticed when that comes. The kernel
therefore sends `NUDGE` after it: any signal ends the wait, and Python then handles earlier ones. It does not
send SIGINT twice, since users' own handlers may end the program at the second one.

Where an event loop is at work, between two steps of tasks, the exception waits for the loop's next round. Raised at
once, it could hit just when a task's next step is put into the queue or taken out of it, and that task would never
go on, not even to be cancelled.

In a finalizer or the callback of a weak reference (a loop's set of tasks has one) Python drops exceptions. An
interrupt that hit there comes once more, with the next nudge.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

from nb_accelerate.notebook.protocol.messages import NUDGE

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from nb_accelerate.base.progress_page import ProgressPage

_LOOPS = ("asyncio", "selectors", "nest_asyncio")


class InterruptGate:
    """Decides what a SIGINT means. Created in the main thread.

    As a context it is entered once for each call or cell; inside, an interrupt raises KeyboardInterrupt.

    Args:
        page: on which the kernel says what it interrupts.
    """

    def __init__(self, page: ProgressPage) -> None:
        self._page = page
        self._heard = 0  # the last of what was said there
        self._pid = os.getpid()
        self._begun = 0  # how many calls and cells
        self._current = 0  # the number of the one that runs
        self._interrupted = 0  # the number of the one that is to be interrupted
        self._raised = 0  # the number of the one that has been
        self._handler = self._on_signal
        signal.signal(signal.SIGINT, self._handler)
        signal.signal(NUDGE, self._on_nudge)
        self._previous_hook = sys.unraisablehook
        sys.unraisablehook = self._on_unraisable
        # The parent blocks it while a rank is born, so that it cannot end the rank before this line.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def __enter__(self) -> InterruptGate:
        self._begun += 1
        self._current = self._begun
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._current = 0

    def check(self) -> None:
        """Raise KeyboardInterrupt if the interrupt came before this call or cell began."""
        if self._is_meant():
            self._raise()

    def _on_signal(self, _signum: int, frame: FrameType | None) -> None:
        # A forked child of this rank, such as a loader's worker, has this handler and the same page: the number is
        # not for it. It ends when the rank does.
        if os.getpid() != self._pid or not self._is_meant():
            return
        loop = asyncio._get_running_loop()  # noqa: SLF001 - as get_running_loop, with None in place of an error
        if loop is not None and _is_in_loop(frame):
            loop.call_soon_threadsafe(self._interrupt, self._current)
        else:
            self._raise()

    def _on_nudge(self, signum: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) == self._handler:  # else SIGINT is the user's affair
            self._on_signal(signum, frame)

    def _interrupt(self, number: int) -> None:
        if number == self._current and self._is_meant():
            self._raise()

    def _is_meant(self) -> bool:
        number, count = self._page.interrupt
        if count != self._heard:
            self._interrupted, self._heard = number, count
        return self._interrupted == self._current != 0

    def _raise(self) -> None:
        # Raised once for each time that an interrupt was asked for.
        self._interrupted, self._raised = 0, self._current
        raise KeyboardInterrupt

    def _on_unraisable(self, dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt) and self._raised == self._current != 0:
            self._interrupted = self._current
        else:
            self._previous_hook(dropped)


def _is_in_loop(frame: FrameType | None) -> bool:
    """Return whether a signal came while an event loop was at work, or while an earlier signal was handled there."""
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _LOOPS
