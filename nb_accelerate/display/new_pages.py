"""Answer a page that is loaded anew while a cell runs, so that it finds the widgets of that cell.

::

    page --"what are you?", "which widgets are there?"--> thread that reads the shell channel --> main thread: busy
                                                              `--> answered here

JupyterLab and Notebook 7 ask both on the channel of cells, where answers wait for the end of the one that runs: until
then all widgets of the page are missing. What follows, a click say, they send to a subshell, which is free.

ipykernel before 7 has no thread that reads the channel, and nothing is changed there.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

_CONTROL = "jupyter.widget.control"
"""Name of the comm by which a page asks for the state of all widgets."""

_users: Counter[int] = Counter()
"""Panels that need answers, by the ``id`` of their kernel."""

_lock = threading.Lock()


def answer_new_pages(kernel: Any) -> None:
    """Answer pages also while a cell runs, until `stop_answering` has been called as often. Any thread."""
    with _lock:
        _users[id(kernel)] += 1
        if _users[id(kernel)] == 1:
            _receive_with(kernel, _Receiver(kernel).receive)


def stop_answering(kernel: Any) -> None:
    """Let the kernel receive its messages as it did before."""
    with _lock:
        _users[id(kernel)] -= 1
        if not _users[id(kernel)]:
            del _users[id(kernel)]
            _receive_with(kernel, getattr(kernel, "shell_channel_thread_main", None))


def _receive_with(kernel: Any, callback: Any) -> None:
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is not None and hasattr(kernel, "shell_channel_thread_main"):
        # The stream belongs to that thread.
        thread.io_loop.add_callback(kernel.shell_stream.on_recv, callback, copy=False)


class _Receiver:
    """Takes the messages of the shell channel in the place of the kernel, and passes on what it does not answer."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._comms: set[str] = set()

    async def receive(self, frames: list[Any]) -> None:
        session = self._kernel.session
        try:
            idents, rest = session.feed_identities(frames, copy=False)
            # A look: the kernel takes no message twice.
            message = session.deserialize(rest, content=False, copy=False)
            is_answered = message["header"].get("subshell_id") is None and self._answer(idents, message)
        except Exception:  # the kernel logs what is wrong with a message
            is_answered = False
        if not is_answered:
            await self._kernel.shell_channel_thread_main(frames)

    def _answer(self, idents: Any, message: dict[str, Any]) -> bool:
        """Answer a message. Returns False if it is one for the kernel."""
        kernel, session, kind = self._kernel, self._kernel.session, message["header"]["msg_type"]
        if kind == "kernel_info_request":
            self._tell_status("busy", message)
            content = {"status": "ok", **kernel.kernel_info}
            session.send(kernel.shell_stream, "kernel_info_reply", content, message, idents)
            self._tell_status("idle", message)
            return True
        if kind not in ("comm_open", "comm_msg", "comm_close"):
            return False
        content = session.unpack(message["content"])
        comm = content.get("comm_id")
        if kind == "comm_open" and content.get("target_name") == _CONTROL:
            self._comms.add(comm)
        if comm not in self._comms:
            return False
        getattr(kernel.comm_manager, kind)(kernel.shell_stream, idents, {**message, "content": content})
        return True

    def _tell_status(self, status: str, message: dict[str, Any]) -> None:
        kernel = self._kernel
        topic = f"kernel.{kernel.ident}.status".encode()
        kernel.session.send(kernel.iopub_socket, "status", {"execution_state": status}, parent=message, ident=topic)
