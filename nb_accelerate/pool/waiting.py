"""Waiting for a turn in the notebook's thread, where an interrupt is meant for the ranks, and so is what is typed."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

from nb_accelerate.errors import PoolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.pool.crew import Crew
    from nb_accelerate.pool.questions import Question
    from nb_accelerate.pool.turn import Turn


def wait_for(crew: Crew, turn: Turn) -> None:
    """Wait until a turn is done; meanwhile put what debuggers on ranks ask to the user.

    Raises:
        PoolError: the thread that listens to the ranks has failed, which is a mistake of ours.
    """
    with interrupts_go_to(crew, turn):
        while (question := turn.questions.get()) is not None:
            _put_to_user(crew, turn, question)
        turn.done.wait()
    if crew.failure is not None:
        raise PoolError("the thread that listens to the ranks has failed") from crew.failure


def _put_to_user(crew: Crew, turn: Turn, question: Question) -> None:
    try:
        with _interrupts_raise():
            text = input(question.prompt)
    except KeyboardInterrupt:
        crew.interrupt(turn)
    except NotImplementedError:  # IPython's StdinNotImplementedError is one
        crew.say(f"rank {question.member.rank} asks for input, and whoever runs this notebook takes none")
        question.answer(None)
    except EOFError:
        question.answer(None)
    else:
        question.answer(text)


@contextlib.contextmanager
def _interrupts_raise() -> Iterator[None]:
    """While the user types, SIGINT ends that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def interrupts_go_to(crew: Crew, turn: Turn) -> Iterator[None]:
    """While the main thread asks ranks and waits for them, SIGINT goes to them, and is no exception here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, lambda *_: crew.interrupt(turn))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
