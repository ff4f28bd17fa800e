"""Answer the messages of our own widgets, and of a page that is reloaded, in the place of the kernel.

::

    click --> `Answers` --busy--> what the button does --idle--> page
    page that is reloaded --"what are you?", "which widgets are there?"-----> `Answers` --> page

The kernel would answer a click after the cell that runs, when the widget is gone; and it would run the user's
``pre_execute`` and ``post_execute`` hooks around the answer, and matplotlib's closes the figures of that cell.
So all messages to widgets are answered here, by a direct call, also messages that name a subshell.

JupyterLab and Notebook 7, when they are reloaded, ask for all states at once and, where no answer comes within four
seconds, for a list of comms and then for the state of each.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

_CONTROL = "jupyter.widget.control"
"""Name of the comm by which a page asks for the state of all widgets."""

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
        if comm_id not in self.own and not (kind == "comm_msg" and _asks_for_state(content)):
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


def _asks_for_state(content: dict[str, Any]) -> bool:
    data = content.get("data")
    return isinstance(data, dict) and data.get("method") == "request_state"
