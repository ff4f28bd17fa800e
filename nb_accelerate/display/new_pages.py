"""Answer a page that is loaded anew while a cell runs, so that it finds the widgets of that cell.

::

    page --"what are you?", "which widgets are there?"--> thread that reads the shell channel --> main thread: busy
    user --nb_accelerate.attach() in another cell-------/     `--> answered here

JupyterLab and Notebook 7 ask on the channel of cells, where answers wait for the end of the one that runs: until then
all widgets of the page are missing. They ask for all states at once and, where no answer comes within four seconds,
for a list of comms and then for the state of each. What follows, a click say, they send to a subshell, which is free.

ipykernel before 7 has no thread that reads the channel, and nothing is changed there.
"""

from __future__ import annotations

import ast
import contextvars
import sys
import threading
from collections import Counter
from typing import Any

_CONTROL = "jupyter.widget.control"
"""Name of the comm by which a page asks for the state of all widgets."""

_IMPORTS = {"import nb_accelerate": "nb_accelerate", "from nb_accelerate import attach": "attach"}
"""Imports, and the names that they give, in a cell that is answered while another one runs."""

_CALLS = ("attach", "nb_accelerate.attach")

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
            self._reply("kernel_info_reply", {"status": "ok", **kernel.kernel_info}, message, idents)
            return True
        if kind not in ("comm_info_request", "comm_open", "comm_msg", "comm_close", "execute_request"):
            return False
        content = session.unpack(message["content"])
        message = {**message, "content": content}
        if kind == "comm_info_request":
            self._reply("comm_info_reply", self._comms_of(content.get("target_name")), message, idents)
            return True
        if kind == "execute_request":
            return self._attach(idents, message)
        comm = content.get("comm_id")
        if kind == "comm_open" and content.get("target_name") == _CONTROL:
            self._comms.add(comm)
        if comm not in self._comms and not _asks_for_state(content):
            return False
        # The answer names the question, by which the page knows it. With the whole message for a parent, and not its
        # header alone, ipykernel 7.4 would send all clicks of that widget to the main thread from then on.
        handle = getattr(kernel.comm_manager, kind)
        self._in_context_of(message["header"], handle, kernel.shell_stream, idents, message)
        return True

    def _comms_of(self, target: str | None) -> dict[str, Any]:
        there = list(self._kernel.comm_manager.comms.items())
        comms = {key: {"target_name": one.target_name} for key, one in there if target in (None, one.target_name)}
        return {"status": "ok", "comms": comms}

    def _attach(self, idents: Any, message: dict[str, Any]) -> bool:
        """Run a cell that only shows a panel: it needs nothing of the cell that runs, and is wanted before its end."""
        kernel, content = self._kernel, message["content"]
        package = sys.modules.get("nb_accelerate")
        lock = getattr(kernel, "_main_asyncio_lock", None)
        if lock is None or not lock.locked() or content["silent"] or package is None:
            return False  # it does not wait
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
            self._in_context_of(message, attach, *arguments)
        except Exception as error:
            said = {"ename": type(error).__name__, "evalue": str(error)}
            outcome = {"status": "error", **said, "traceback": [f"{said['ename']}: {said['evalue']}"]}
            self._publish("error", {key: outcome[key] for key in ("ename", "evalue", "traceback")}, message)
        kernel.session.send(kernel.shell_stream, "execute_reply", {**outcome, **count}, message, idents)
        self._tell_status("idle", message)
        return True

    def _in_context_of(self, request: dict[str, Any], function: Any, *arguments: Any) -> None:
        """Call something whose messages belong to a message, which is given, or its header."""
        context = contextvars.copy_context()
        parent = getattr(self._kernel, "_shell_parent", None)
        if parent is not None:
            context.run(parent.set, request)
        context.run(function, *arguments)

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
        names = [_IMPORTS[ast.unparse(one)] for one in imports]
        given = [*call.args, *(one.value for one in call.keywords if one.arg == "name")]
        called, arguments = ast.unparse(call.func), [ast.literal_eval(one) for one in given]
    except (SyntaxError, ValueError, KeyError):
        return None
    return (
        (names, called, arguments) if called in _CALLS and len(given) == len(call.args) + len(call.keywords) else None
    )
