"""Waiting for a turn in the notebook's thread, where an interrupt is meant for the ranks, and so is what is typed."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self

    from nb_accelerate.ranks.input_requests import Question
    from nb_accelerate.ranks.loop import Crew
    from nb_accelerate.ranks.request import Turn


def wait_for(crew: Crew, turn: Turn) -> None:
    """Wait until a turn is done; meanwhile put what debuggers on ranks ask to the user."""
    with interrupts_go_to(crew, turn):
        while (question := turn.questions.get()) is not None:
            _put_to_user(crew, turn, question)
        turn.done.wait()


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


class Interrupts:
    """SIGINT of the main thread while ranks are started or ended, which must not be left half done.

    Inside, an interrupt is kept, and raised when this is left. What takes its time inside has it passed on, and ends
    early. In other threads there are no interrupts.
    """

    def __init__(self) -> None:
        self._is_main = threading.current_thread() is threading.main_thread()
        self._came = False
        self._action: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        if self._is_main:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_main:
            return
        signal.signal(signal.SIGINT, self._previous)
        if self._came and not isinstance(error, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    @contextlib.contextmanager
    def go_to(self, action: Callable[[], object]) -> Iterator[None]:
        """Inside, `action` is called for an interrupt, and at once if one has come before."""
        self._action = action
        try:
            if self._came:
                action()
            yield
        finally:
            self._action = None

    def _on_signal(self, *_: object) -> None:
        self._came = True
        if self._action is not None:
            self._action()
