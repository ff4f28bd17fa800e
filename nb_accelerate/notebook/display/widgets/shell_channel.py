"""Take the messages of the shell channel in the place of the kernel, so that clicks are answered while a cell runs.

::

    ipykernel 7   page --> thread that reads the channel --------+--> `Answers` --> page
    ipykernel 6   page --> a waiting cell, ten times a second ---+       `--> the kernel: after the cell, in order
                           the kernel's own loop, while none runs

`answer_messages` begins, `stop_answering` ends it. In ipykernel 6 only the main thread may read the channel, so what
waits in it for ranks calls `read_shell_channel`. `input()`, and what the user waits for in other ways, reads nothing.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.display.widgets.widget_messages import Answers
from nb_accelerate.notebook.protocol.interrupts import interrupts_later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

_READ_EVERY = 0.1
"""Seconds between two times that a waiting cell reads the channel."""

_LINGER = 10.0
"""Seconds after the end of the last panel in which clicks on it still come: the kernel would say that there is "No such
comm", in a cell."""

_channels: dict[int, _Channel] = {}
"""The channels that are read here, by the ``id`` of their kernel."""

_lock = threading.Lock()


def can_answer(kernel: Any) -> bool:
    """Return whether messages of this kernel can be answered while a cell runs."""
    return _has(kernel, "shell_stream", "comm_manager") and _kernels_own(kernel) is not None


def answer_messages(kernel: Any) -> None:
    """Answer messages also while a cell runs, until `stop_answering` has been called as often. Any thread."""
    with _lock:
        channel = _channels.get(id(kernel)) or _Channel(kernel)
        _channels[id(kernel)] = channel
        channel.begin()


def answer_widgets(kernel: Any, widgets: Iterable[Any]) -> None:
    """Answer messages of these widgets as well. Any thread, between `answer_messages` and `stop_answering`."""
    _channels[id(kernel)].answers.own.update(widget.comm.comm_id for widget in widgets)


def stop_answering(kernel: Any) -> None:
    """Let the kernel receive its messages as it did before, a while after the last panel has ended. Any thread."""
    with _lock:
        _channels[id(kernel)].end()


def read_shell_channel() -> float:
    """Answer what has come for this thread to read, and return the seconds after which this is to be called again.

    A wait in a cell calls it. It does nothing, and returns infinity, where another thread reads the channel.
    """
    if not _channels or threading.current_thread() is not threading.main_thread():
        return math.inf
    return min((channel.read_if_due() for channel in list(_channels.values())), default=math.inf)


class _Channel:
    """The shell channel of a kernel."""

    def __init__(self, kernel: Any) -> None:
        self._users = self._changes = 0
        self.answers = Answers(kernel)
        self._kernel, self._stream = kernel, kernel.shell_stream
        pass_on = _kernels_own(kernel)
        assert pass_on is not None, "see can_answer"
        self._pass_on = pass_on
        self._has_thread = _has_thread(kernel)
        self._is_taken = False
        self._read_at = 0.0

    def begin(self) -> None:
        """Count one more user. The caller of this and of `end` holds the lock."""
        self._users += 1
        self._changes += 1
        self._stream.io_loop.add_callback(self._take)

    def end(self) -> None:
        """Count one user less."""
        self._users -= 1
        self._changes += 1
        loop = self._stream.io_loop
        loop.add_callback(loop.call_later, _LINGER, self._give_back, self._changes)

    def read_if_due(self) -> float:
        """Read all that has come; the main thread of ipykernel 6 only."""
        if self._has_thread:
            return math.inf
        due = self._read_at + _READ_EVERY - time.monotonic()
        if due > 0:
            return due
        with interrupts_later():  # between reading a message and putting it into the kernel's queue, one would lose it
            try:
                self._take()
                self._stream.flush()  # until nothing is left: the descriptor tells of what comes, not of what is there
            except Exception as error:  # buttons are no reason to end what waits for ranks
                logger.warning("Buttons are answered after the cell (%s: %s).", type(error).__name__, error)
                self._read_at = math.inf
                return math.inf
        self._read_at = time.monotonic()
        return _READ_EVERY

    # In the thread that reads the channel.

    def _take(self) -> None:
        if not self._is_taken:
            self._is_taken = True
            self._stream.on_recv(self._receive, copy=False)

    def _give_back(self, changes: int) -> None:
        with _lock:
            if self._users or self._changes != changes:  # it has been used again
                return
            del _channels[id(self._kernel)]
        self._stream.on_recv(self._pass_on, copy=False)

    def _receive(self, frames: list[Any]) -> Any:
        return None if self.answers.answer(frames) else self._pass_on(frames)


def _has_thread(kernel: Any) -> bool:
    return _has(kernel, "shell_channel_thread", "shell_channel_thread_main", "_shell_parent")


def _has(kernel: Any, *names: str) -> bool:
    return all(getattr(kernel, name, None) is not None for name in names)


def _kernels_own(kernel: Any) -> Callable[[list[Any]], Any] | None:
    """Return what the kernel itself does with a message; None if this is no kernel whose ways are known."""
    if _has_thread(kernel):
        return kernel.shell_channel_thread_main  # type: ignore[no-any-return]
    if _has(kernel, "schedule_dispatch", "dispatch_shell", "_parents"):
        # Its queue keeps the order of cells, and knows which are not to run after an error.
        return lambda frames: kernel.schedule_dispatch(kernel.dispatch_shell, frames)
    return None
