"""Where the main thread of a rank is, also while C code holds the interpreter.

A thread of the rank writes it when it is asked (`nb_accelerate.worker.stack_writer`). If that thread does not get the
interpreter's lock, the rank gets a signal for which it has registered `faulthandler`, which writes the same from C
code. A stopped process (SIGSTOP) does not answer.
"""

from __future__ import annotations

import re
import signal

from nb_accelerate.diagnostics.render import place
from nb_accelerate.errors.traceback_lines import is_users
from nb_accelerate.protocol.messages import Frame

DUMP_SIGNAL = signal.SIGUSR2
"""Asks a rank for its stacks."""

STOPPED = "stopped (SIGSTOP)"
"""Stands for the stacks of a process that cannot answer."""

_THREAD = re.compile(r"^(?:(?:Current thread|Thread) 0x[0-9a-f]+.*|Stack \(most recent call first\):)$", re.MULTILINE)
_LINE = re.compile(r'^  File "(?P<filename>.*)", line (?P<lineno>\d+) in (?P<name>.*)$', re.MULTILINE)
_SAID = {"_engine_run_backward": "backward"}
"""What people call a function of torch."""

_WORKER = re.compile(r"nb_accelerate/(?:worker|launch)/\w+\.py$|^<string>$")


_LAST_LINE = b'  File "<string>", line 1 in <module>\n'
"""Last line of each complete dump: one is written in pieces and ends with the main thread, begun by ``python -c``."""


def is_whole(dump: bytes | bytearray) -> bool:
    """Return whether all of a rank's dump has come. False for one of stacks that are too deep to be listed whole."""
    return dump.endswith(_LAST_LINE)


def main_thread(dump: str) -> tuple[Frame, ...]:
    """Return the frames of the main thread, innermost first, from a dump; none from an empty one.

    Users' code runs in the main thread, which the system prefers for signals; faulthandler lists it last, or alone.
    """
    threads = _THREAD.split(dump)
    if len(threads) < 2:
        return ()
    return tuple(
        Frame(filename=match["filename"], lineno=int(match["lineno"]), name=match["name"])
        for match in _LINE.finditer(threads[-1])
    )


def where(dump: str) -> str:
    """Return in a few words what a rank was doing, for a list of ranks.

    The innermost frame, and the line of the notebook (or of the user's file) that led there.
    """
    if dump == STOPPED:
        return dump
    frames = [frame for frame in main_thread(dump) if not _WORKER.search(frame.filename)]
    if not frames:
        return "no answer"
    first = frames[0]
    user = next((frame for frame in frames if is_users(frame.filename)), first)
    if user is first:
        return f"in {place(first)}"
    return f"in {_SAID.get(first.name, first.name)}, called from {place(user)}"


def innermost(dump: str) -> str:
    """Return the function a rank is in; "" if it did not answer."""
    frames = main_thread(dump)
    return _SAID.get(frames[0].name, frames[0].name) if frames else ""


def listed(dump: str) -> str:
    """Return where the main thread of a rank is, innermost first, a line each; frames of our own are left out."""
    if dump == STOPPED:
        return dump
    places = [place(frame) for frame in main_thread(dump) if not _WORKER.search(frame.filename)]
    return "\n".join(places) or "no answer"
