"""Wait in the notebook's thread, where buttons of panels, interrupts and typed lines arrive meanwhile."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from typing import TYPE_CHECKING

from nb_accelerate.notebook.display.widgets.shell_channel import read_shell_channel
from nb_accelerate.notebook.ranks.failing.errors import interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self


def ask_user(prompt: str) -> str | None:
    """Return the line that the user types; None at the end of input. SIGINT raises KeyboardInterrupt."""
    # The wait around this has put a handler in the place of Python's, by which `input` would not end.
    with interrupts_call(lambda: signal.default_int_handler(signal.SIGINT, None)):
        try:
            return input(prompt)
        except EOFError:
            return None


def wait(event: threading.Event, timeout: float | None = None) -> bool:
    """Wait for an event as its own method does, and let the buttons of panels be pressed meanwhile."""
    until = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        # Waits in pieces: with ipykernel 6 only this thread may read the shell channel, where clicks arrive.
        seconds = min(read_shell_channel(), until - time.monotonic())
        if event.wait(None if seconds == math.inf else max(0.0, seconds)):
            return True
        if time.monotonic() >= until:
            return False


@contextlib.contextmanager
def goes_on_if_interrupted(what: str, *, ends_by: str) -> Iterator[None]:
    """Say in one line, if a wait inside the block is interrupted, that what it waits for goes on.

    Raises:
        KeyboardInterrupt: the wait was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise interrupted(f"only the wait was interrupted: {what} goes on. {ends_by} ends it") from None


@contextlib.contextmanager
def interrupts_call(action: Callable[[], object]) -> Iterator[None]:
    """Have SIGINT call `action` inside the block, and raise nothing."""
    # It does nothing in other threads than the main one, which get no signals.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class Interrupts:
    """A context manager that puts off interrupts while ranks are started or ended, which must not be left half done.

    An interrupt is raised when the block is left. Meanwhile, what takes long inside can have it passed on, by `go_to`,
    and end early. In other threads than the main one it does nothing.
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
            # The handler that is set again gets it, as if it had come only now.
            signal.raise_signal(signal.SIGINT)

    @contextlib.contextmanager
    def go_to(self, action: Callable[[], object]) -> Iterator[None]:
        """Call `action` when an interrupt comes inside the block, or at once if one has come before."""
        # Set before it is checked: an interrupt that comes in between calls the action twice, and not never.
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
