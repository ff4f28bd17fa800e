"""Waiting for a turn in the notebook's thread, where an interrupt is meant for the ranks."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

from nb_accelerate.errors import PoolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.pool.crew import Crew
    from nb_accelerate.pool.turn import Turn


def wait_for(crew: Crew, turn: Turn) -> None:
    """Wait until a turn is done.

    Raises:
        PoolError: the thread that listens to the ranks has failed, which is a mistake of ours.
    """
    with _interrupts_go_to(crew, turn):
        turn.done.wait()
    if crew.failure is not None:
        raise PoolError("the thread that listens to the ranks has failed") from crew.failure


@contextlib.contextmanager
def _interrupts_go_to(crew: Crew, turn: Turn) -> Iterator[None]:
    """While the main thread waits, SIGINT goes to the ranks, and is no exception here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, lambda *_: crew.interrupt(turn))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
