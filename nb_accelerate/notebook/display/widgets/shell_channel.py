"""Take the messages of the shell channel in the place of the kernel, so that clicks are answered while a cell runs.

::

    ipykernel 7   page --> thread that reads the channel --------+--> `Answers` --> page
    ipykernel 6   page --> a waiting cell, ten times a second ---+       `--> the kernel: after the cell, in order
                           the kernel's own loop, while none runs

`answer_messages` begins, `stop_answering` ends it. In ipykernel 6 only the main thread may read the channel, so what
waits in it for ranks calls `read_shell_channel`. `input()`, and what the user waits for in other ways, reads nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.protocol.interrupts import interrupts_later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


logger = logging.getLogger(__name__)

_CONTROL = "jupyter.widget.control"  # name of the comm by which a page asks for the state of all widgets

_OF_COMMS = ("comm_open", "comm_msg", "comm_close")


class Answers:
    """Answers messages of the shell channel. All but `own` is for the thread that reads the channel.

    Attributes:
        own: ids of the comms whose messages are answered here. They stay when a widget is closed: clicks on it may be
            on their way.
    """

    def __init__(self, kernel: Any) -> None:
        self.own: set[str] = set()
        self._kernel = kernel

    def answer(self, frames: list[Any]) -> bool:
        """Answer a message. Returns False if it is one for the kernel."""
        session = self._kernel.session
        try:
            idents, rest = session.feed_identities(frames, copy=False)
            # Nothing is taken here: the kernel accepts no message twice.
            message = session.deserialize(rest, content=False, copy=False)
            kind, subshell = message["header"]["msg_type"], message["header"].get("subshell_id")
            if kind in _OF_COMMS or kind == "comm_info_request":
                message = {**message, "content": session.unpack(message["content"])}
        except Exception:  # the kernel logs what is wrong with a message
            return False
        if kind in _OF_COMMS:
            return self._answer_widget(idents, message)
        if subshell is not None:
            return False  # it waits for no cell
        if kind == "kernel_info_request":
            self._reply("kernel_info_reply", {"status": "ok", **self._kernel.kernel_info}, message, idents)
        elif kind == "comm_info_request":
            target = message["content"].get("target_name")
            there = {key: comm.target_name for key, comm in list(self._kernel.comm_manager.comms.items())}
            comms = {key: {"target_name": name} for key, name in there.items() if target in (None, name)}
            self._reply("comm_info_reply", {"status": "ok", "comms": comms}, message, idents)
        else:
            return False
        return True

    def _answer_widget(self, idents: Any, message: dict[str, Any]) -> bool:
        kernel, kind, content = self._kernel, message["header"]["msg_type"], message["content"]
        comm_id = content.get("comm_id")
        if kind == "comm_open" and content.get("target_name") == _CONTROL:
            self.own.add(comm_id)
        asks_for_state = kind == "comm_msg" and (content.get("data") or {}).get("method") == "request_state"
        if comm_id not in self.own and not asks_for_state:
            return False
        # A page that has sent a field sends the next one when the kernel is idle again.
        self._tell_status("busy", message)
        try:
            # The answer names the question, by which the page knows it. With the whole message for a parent, and not
            # its header alone, ipykernel 7.4 would send what else comes from that widget to a queue of its choice.
            with self._parent(message["header"]) as call:
                if kind == "comm_msg":
                    comm = kernel.comm_manager.comms.get(comm_id)
                    callback = getattr(comm, "_msg_callback", None)  # `handle_msg` runs the user's hooks as well
                    if callback is not None:
                        call(callback, message)
                elif kind == "comm_open" or comm_id in kernel.comm_manager.comms:
                    call(getattr(kernel.comm_manager, kind), kernel.shell_stream, idents, message)
        except Exception:
            logger.exception("A message of a widget could not be answered.")
        self._tell_status("idle", message)
        return True

    @contextlib.contextmanager
    def _parent(self, request: dict[str, Any]) -> Iterator[Callable[..., object]]:
        """Give a function that calls another one, whose messages belong to the message with this header."""
        kernel = self._kernel
        parents = getattr(kernel, "_parents", None)  # ipykernel 6
        if parents is None:
            context = contextvars.copy_context()
            context.run(kernel._shell_parent.set, request)  # noqa: SLF001
            yield context.run
            return
        before = parents["shell"]
        parents["shell"] = request
        try:
            yield lambda function, *arguments: function(*arguments)
        finally:
            parents["shell"] = before

    def _reply(self, kind: str, content: dict[str, Any], message: dict[str, Any], idents: Any) -> None:
        self._tell_status("busy", message)
        self._kernel.session.send(self._kernel.shell_stream, kind, content, message, idents)
        self._tell_status("idle", message)

    def _tell_status(self, status: str, message: dict[str, Any]) -> None:
        kernel, content = self._kernel, {"execution_state": status}
        topic = f"kernel.{kernel.ident}.status".encode()
        kernel.session.send(kernel.iopub_socket, "status", content, parent=message, ident=topic)


_READ_EVERY = 0.1  # seconds between two times that a waiting cell reads the channel

# Seconds after the end of the last panel in which clicks on it still come: the kernel would say that there is "No such
# comm", in a cell.
_LINGER = 10.0

_channels: dict[int, _Channel] = {}  # the channels that are read here, by the ``id`` of their kernel

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
            except Exception as error:  # a failing button must not end the wait for ranks
                logger.warning("Buttons are answered after the cell (%s: %s).", type(error).__name__, error)
                self._read_at = math.inf
                return math.inf
        self._read_at = time.monotonic()
        return _READ_EVERY

    # Called in the thread that reads the channel.

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
