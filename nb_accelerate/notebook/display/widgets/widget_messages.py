"""Answer the messages of our own widgets, and of a page that is reloaded, in the place of the kernel.

::

    click --> `Answers` --busy--> what the button does --idle--> page
    page that is reloaded --"what are you?", "which widgets are there?"-----> `Answers` --> page
    user --nb_accelerate.attach() in another cell-------------------------------^

The kernel would answer a click after the cell that runs, when the widget is gone; and it would run the user's
``pre_execute`` and ``post_execute`` hooks around the answer, and matplotlib's closes the figures of that cell.
So all messages to widgets are answered here, by a direct call, also messages that name a subshell.

JupyterLab and Notebook 7, when they are reloaded, ask for all states at once and, where no answer comes within four
seconds, for a list of comms and then for the state of each.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

_CONTROL = "jupyter.widget.control"
"""Name of the comm by which a page asks for the state of all widgets."""

_OF_COMMS = ("comm_open", "comm_msg", "comm_close")

_IMPORTS = {"import nb_accelerate": "nb_accelerate", "from nb_accelerate import attach": "attach"}
"""Imports, and the names that they give, in a cell that is answered while another one runs."""

_CALLS = ("attach", "nb_accelerate.attach")


class Answers:
    """Answers messages of the shell channel. All but `own` is for the thread that reads the channel.

    Attributes:
        own: ids of the comms whose messages are answered here. They stay when a widget is closed: clicks on it may be
            on their way.
    """

    def __init__(self, kernel: Any, has_waiting_cell: Callable[[], bool]) -> None:
        self.own: set[str] = set()
        self._kernel = kernel
        self._has_waiting_cell = has_waiting_cell

    def answer(self, frames: list[Any]) -> bool:
        """Answer a message. Returns False if it is one for the kernel."""
        session = self._kernel.session
        try:
            idents, rest = session.feed_identities(frames, copy=False)
            # Nothing is taken here: the kernel accepts no message twice.
            message = session.deserialize(rest, content=False, copy=False)
            kind, subshell = message["header"]["msg_type"], message["header"].get("subshell_id")
            if kind in _OF_COMMS or (kind in ("comm_info_request", "execute_request") and subshell is None):
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
            self._reply("comm_info_reply", self._comms_of(message["content"].get("target_name")), message, idents)
        else:
            return kind == "execute_request" and self._attach(idents, message)
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

    def _comms_of(self, target: str | None) -> dict[str, Any]:
        there = {key: comm.target_name for key, comm in list(self._kernel.comm_manager.comms.items())}
        comms = {key: {"target_name": name} for key, name in there.items() if target in (None, name)}
        return {"status": "ok", "comms": comms}

    def _attach(self, idents: Any, message: dict[str, Any]) -> bool:
        """Run a cell that only shows a panel: it needs nothing of the cell that runs, and is wanted before its end."""
        kernel, content = self._kernel, message["content"]
        package = sys.modules.get("nb_accelerate")
        if not self._has_waiting_cell() or content["silent"] or package is None:
            return False
        found = _call_of_attach(content["code"])
        if found is None:
            return False
        imported, called, arguments = found
        names = kernel.shell.user_ns
        names |= {name: package if name == "nb_accelerate" else package.attach for name in imported}
        attach = getattr(names.get("nb_accelerate"), "attach", None) if "." in called else names.get("attach")
        if attach is not package.attach:
            return False
        self._tell_status("busy", message)
        # The cell that runs is the last one that is counted.
        count = {"execution_count": kernel.execution_count}
        self._publish("execute_input", {"code": content["code"], **count}, message)
        outcome: dict[str, Any] = {"status": "ok", "payload": [], "user_expressions": {}}
        try:
            with self._parent(message) as call:
                call(attach, *arguments)
        except Exception as error:
            said = {"ename": type(error).__name__, "evalue": str(error)}
            outcome = {"status": "error", **said, "traceback": [f"{said['ename']}: {said['evalue']}"]}
            self._publish("error", {key: outcome[key] for key in ("ename", "evalue", "traceback")}, message)
        kernel.session.send(kernel.shell_stream, "execute_reply", {**outcome, **count}, message, idents)
        self._tell_status("idle", message)
        return True

    @contextlib.contextmanager
    def _parent(self, request: dict[str, Any]) -> Iterator[Callable[..., object]]:
        """Give a function that calls another one, whose messages belong to a message, which is given, or its header."""
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
        self._publish("status", {"execution_state": status}, message)

    def _publish(self, kind: str, content: dict[str, Any], message: dict[str, Any]) -> None:
        kernel = self._kernel
        topic = f"kernel.{kernel.ident}.{kind}".encode()
        kernel.session.send(kernel.iopub_socket, kind, content, parent=message, ident=topic)


def _asks_for_state(content: dict[str, Any]) -> bool:
    data = content.get("data")
    return isinstance(data, dict) and data.get("method") == "request_state"


def _call_of_attach(code: str) -> tuple[list[str], str, list[Any]] | None:
    """Return what code that only calls ``attach`` imports, what it calls, and with what; None for all other code."""
    try:
        *imports, last = ast.parse(code).body
        if not isinstance(last, ast.Expr) or not isinstance(last.value, ast.Call):
            return None
        call = last.value
        names = [_IMPORTS[ast.unparse(line)] for line in imports]
        given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "name")]
        called, arguments = ast.unparse(call.func), [ast.literal_eval(argument) for argument in given]
    except (SyntaxError, ValueError, KeyError):
        return None
    return (
        (names, called, arguments) if called in _CALLS and len(given) == len(call.args) + len(call.keywords) else None
    )
