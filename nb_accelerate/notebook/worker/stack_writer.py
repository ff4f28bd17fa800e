"""A thread of a rank that answers requests while the main thread is busy: where that is, or to end its collective."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import traceback
from traceback import walk_stack
from typing import TYPE_CHECKING

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.base.progress_page import here
from nb_accelerate.errors.traceback_lines import is_users
from nb_accelerate.notebook.diagnostics.stacks import ONE_THREAD, users_line
from nb_accelerate.notebook.protocol.channel import Channel, as_bytes
from nb_accelerate.notebook.protocol.messages import CutOff, Frame

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from nb_accelerate.notebook.worker.alarm import Alarm

_MAX_FRAMES = 400  # Frames that are written, innermost first. Of a deeper stack, the outermost frame follows.

# Requests. The answer to the second one stands on the progress page. Another one is a `CutOff`.
ASK_STACK, ASK_LINE = as_bytes("stack"), as_bytes("line")

# Files in which threads begin that never run code of users: of progress bars and loaders, which most training has.
_LIBRARIES = ("/tqdm/_monitor.py", "/multiprocessing/queues.py", "/torch/utils/data/_utils/pin_memory.py")

_COMPILER = "/torch/_dynamo/convert_frame.py"


def answer_requests(stacks: int, alarm: Alarm) -> None:
    """Start the thread. Requests come over a socket, which takes stacks; `alarm` answers a `CutOff`."""
    # The thread ends when nobody can ask any more. It needs the interpreter's lock: it answers while the main thread
    # runs Python code, or waits in C code that has released the lock, and does not answer while C code holds it.
    # `faulthandler` writes stacks then. It is no substitute: it reads frames that may change meanwhile, and CPython
    # 3.11 crashed in it.
    # `threading.Thread.start` would wait until the thread runs, on the way of every launch.
    _thread.start_new_thread(HelperThread(_serve, stacks, alarm, name="alarm").run, ())


def _serve(stacks: int, alarm: Alarm) -> None:
    # Signals are for the main thread: one that came to this thread would not wake up what that waits in.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    channel = Channel.from_fd(os.dup(stacks))  # C code may write to the other one when this thread has ended
    while True:
        try:
            requests = [channel.recv().message]
            requests += [request for request, _ in channel.drain()[0]]
        except EOFError:  # the kernel has gone, or has done with this rank
            return
        for request in requests:
            if isinstance(request, CutOff):
                alarm.answer(request)
        try:
            _answer(stacks, requests)
        except OSError:  # the kernel has gone
            return
        except Exception:  # the thread has to go on, because a `CutOff` may follow; C code writes the stack
            traceback.print_exc()


def _answer(stacks: int, requests: list[object]) -> None:
    """Answer requests for the stack, once for all that have come, and for the user's line."""
    if "line" in requests:
        note_line()
    answer = _listed(_frame(), has_one_thread=not _has_threads_of_users()) if "stack" in requests else b""
    while answer:
        answer = answer[os.write(stacks, answer) :]


def note_line() -> None:
    """Write the user's line to the progress page, unless the main thread enters a phase meanwhile."""
    page = here()
    moment = page.moment
    frame = _frame()
    line_and_call = users_line(_frames(frame))
    inside = _inside(frame)
    if line_and_call is not None and page.moment == moment:
        line, called = line_and_call
        page.note_line(moment, filename=line.filename, lineno=line.lineno, called=called, inside=inside)


def _frame() -> FrameType | None:
    """Return the frame of the main thread. It keeps the variables of a function alive: let go of it."""
    return sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - the documented way to it


def _inside(frame: FrameType | None) -> str:
    """Return what the user's line does: ``importing pandas`` or ``compiling``, however deep; or what it has called."""
    called, is_deep = "", False
    for caller, _ in walk_stack(frame):
        code = caller.f_code
        if is_users(code.co_filename):
            break
        if code.co_name == "_find_and_load" and code.co_filename == "<frozen importlib._bootstrap>":
            called, is_deep = f"importing {caller.f_locals.get('name')}", True
        elif code.co_filename.endswith(_COMPILER):
            called, is_deep = "compiling", True
        elif not is_deep:
            # Not by `f_locals`: until Python 3.13 a frame keeps what was read there, a batch say, until it ends.
            called = code.co_name
            if called.startswith("__"):  # the class; Python 3.10 does not name it
                called = getattr(code, "co_qualname", "").rpartition(".")[0].rpartition(".")[2]
    return called


def _frames(frame: FrameType | None) -> Iterator[Frame]:
    for caller, lineno in walk_stack(frame):
        yield Frame(filename=caller.f_code.co_filename, lineno=lineno, name=caller.f_code.co_name)


def _has_threads_of_users() -> bool:
    """Return whether threads live that may run code of users, beside the main thread. Called in this module's own."""
    helpers = {thread.ident for thread in threading.enumerate() if isinstance(thread, HelperThread)}
    helpers |= {threading.main_thread().ident, threading.get_ident()}
    frames = sys._current_frames()  # noqa: SLF001 - the documented way to them
    return any(ident not in helpers and not _is_of_library(frame) for ident, frame in frames.items())


def _is_of_library(frame: FrameType) -> bool:
    files = [caller.f_code.co_filename for caller, _ in walk_stack(frame)]
    first_file = next((file for file in reversed(files) if not file.endswith("/threading.py")), "")
    return first_file.endswith(_LIBRARIES)


def _listed(frame: FrameType | None, *, has_one_thread: bool) -> bytes:
    lines = [f'  File "{line.filename}", line {line.lineno} in {line.name}\n' for line in _frames(frame)]
    if len(lines) > _MAX_FRAMES:
        lines[_MAX_FRAMES:] = ["  ...\n", lines[-1]]
    head = ONE_THREAD if has_one_thread else ""
    return "".join([head, "Stack (most recent call first):\n", *lines]).encode("ascii", "backslashreplace")
