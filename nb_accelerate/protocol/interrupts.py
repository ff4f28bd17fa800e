"""Interrupts that wait until what belongs together is done."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """An interrupt of the cell waits until this is left.

    It must not end a child before that has said what SIGINT means to it, nor leave half of what belongs together done.
    Blocking it is for the child; here another thread may get it, and then Python's handler runs in the main thread.
    """
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # No other thread runs handlers, and one that was not installed from Python could not be put back.
    is_ours = threading.current_thread() is threading.main_thread() and handler is not None
    if is_ours:
        signal.signal(signal.SIGINT, lambda signum, _: came.append(signum))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_ours:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
