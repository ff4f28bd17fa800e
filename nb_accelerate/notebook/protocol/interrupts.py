"""Put interrupts off while what must not be left half done is done."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Put off an interrupt of the cell until the block is left."""
    # It must not end a child before that one has set its handler of SIGINT, nor come between a step and the step that
    # undoes it. SIGINT is blocked for the sake of the child; in this process another thread may get it, so Python's
    # handler is replaced too.
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
