"""Where the main thread of a rank is, also while C code holds the interpreter, and whether it waits for others there.

A thread of the rank writes it when it is asked (`notebook.worker.stack_writer`). If that thread does not get the
interpreter's lock, the rank gets a signal for which it has registered `faulthandler`, which writes the same from C
code.
"""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from nb_accelerate.errors.traceback_lines import is_ours, is_users
from nb_accelerate.notebook.diagnostics.render import place
from nb_accelerate.notebook.protocol.messages import Frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

DUMP_SIGNAL = signal.SIGUSR2  # asks a rank for its stacks

_THREAD = re.compile(r"^(?:(?:Current thread|Thread) 0x[0-9a-f]+.*|Stack \(most recent call first\):)$", re.MULTILINE)
_LINE = re.compile(r'^  File "(?P<filename>.*)", line (?P<lineno>\d+) in (?P<name>.*)$', re.MULTILINE)
# What people call a function of torch.
_SAID = {"_engine_run_backward": "backward", "_wrapped_call_impl": "forward", "_call_impl": "forward"}

# Files with functions that users call by other names, of `Accelerator` or of torch.
_COLLECTIVES = ("/torch/distributed/", "/nb_accelerate/training/comm/")

_WRAPPERS = ("wrapper", "inner", "decorate_context")  # functions of decorators around a collective

_WORKER = re.compile(r"nb_accelerate/notebook/(?:worker|launch|diagnostics|protocol)/[\w/]+\.py$|^<string>$")

OUTSIDE = "outside your code"  # where a rank is that runs no code of users and of libraries

# First line of a dump of such a rank, unless `faulthandler` has written it.
ONE_THREAD = "Only one thread runs code of users.\n"

# Last line of each complete dump: one is written in pieces and ends with the main thread, begun by ``python -c``.
_LAST_LINE = b'  File "<string>", line 1 in <module>\n'

_BACKWARD = "/torch/autograd/graph.py"

# Files whose innermost frame waits for others. A backward does, in C++ code: gradients are averaged in it; a forward of
# a parallel model, for its buffers; and ours, where a collective runs on the device, for its result.
_WAIT_IN = ("/torch/distributed/", _BACKWARD, "/torch/nn/parallel/distributed.py", "/nb_accelerate/training/comm/")

# Files whose innermost frame waits for ranks and for nothing else: the folder of the first also has remote calls,
# launchers of processes and writers of checkpoints.
_EXCHANGES = ("/torch/distributed/distributed_c10d.py", "/torch/nn/parallel/distributed.py")

# Functions of torch.distributed that wait for processes outside of a launch too, or for a shorter time.
_WAITS_WITH_AN_END = ("init_process_group", "new_group", "monitored_barrier")


def is_whole(dump: bytes | bytearray) -> bool:
    """Return whether all of a rank's dump has come. False for one of stacks that are too deep to be listed whole."""
    return dump.endswith(_LAST_LINE)


def has_one_thread(dump: str) -> bool:
    """Return whether a rank says that no thread of its users lives beside the main thread."""
    return dump.startswith(ONE_THREAD)


def main_thread(dump: str) -> tuple[Frame, ...]:
    """Return the frames of the main thread, innermost first, from a dump; none from an empty one."""
    # Users' code runs in the main thread, which the system prefers for signals; faulthandler lists it last, or alone.
    threads = _THREAD.split(dump)
    if len(threads) < 2:
        return ()
    return tuple(
        Frame(filename=match["filename"], lineno=int(match["lineno"]), name=match["name"])
        for match in _LINE.finditer(threads[-1])
    )


def where(dump: str) -> str:
    """Return in a few words what a rank was doing, for a list of ranks: see `where_in`."""
    found = main_thread(dump)  # without frames of users it is about to run their code, or tells how that has ended
    return where_in(found) or (OUTSIDE if found else "no answer")


def where_in(frames: Iterable[Frame]) -> str:
    """Return the innermost frame, and the line of the notebook (or of the user's file) that led there."""
    frames = [frame for frame in frames if not _WORKER.search(frame.filename)]
    if not frames:
        return ""
    # Python runs finalizers at any line: where one is says nothing about the program.
    finalizers = [number for number, frame in enumerate(frames[:-1]) if frame.name == "__del__"]
    if finalizers:
        frames = frames[finalizers[-1] + 1 :]
    first = frames[0]
    user = next((frame for frame in frames if is_users(frame.filename)), first)
    if user is first:
        return f"in {place(first)}"
    return f"in {_said(frames, user)}, called from {place(user)}"


def users_line(frames: Iterable[Frame]) -> tuple[Frame, str] | None:
    """Return the innermost frame of users' code, and the name by which it calls a collective; None without one."""
    inside: list[Frame] = []
    for frame in frames:
        inside.append(frame)
        if is_users(frame.filename):
            return frame, _said(inside, frame) if any(part in inside[0].filename for part in _COLLECTIVES) else ""
    return None


def _said(frames: Sequence[Frame], user: Frame) -> str:
    """Return the name of the innermost function; of a collective the name that the user's line has for it."""
    name = frames[0].name
    if any(part in frames[0].filename for part in _COLLECTIVES):
        called = [frame.name for frame in frames[: frames.index(user)] if frame.name not in _WRAPPERS]
        name = called[-1] if called else name
    return _SAID.get(name, name)


def listed(dump: str) -> tuple[list[str], list[str]]:
    """Return where the main thread of a rank is, innermost frame first: users' frames, and those of libraries.

    Frames of our own are left out. Without an answer the first list says so.
    """
    frames = [frame for frame in main_thread(dump) if not _WORKER.search(frame.filename)]
    users = [place(frame) for frame in frames if is_users(frame.filename)]
    others = [place(frame) for frame in frames if not (is_users(frame.filename) or is_ours(frame.filename))]
    if not users and not others:
        return [OUTSIDE if frames else "no answer"], []
    return users, others


def who_waits(dumps: Mapping[int, str]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return which ranks are inside a collective and which elsewhere, each by the place, by their stacks."""
    waiting: dict[str, list[int]] = {}
    elsewhere: dict[str, list[int]] = {}
    for rank, dump in sorted(dumps.items()):
        frames = main_thread(dump)
        in_collective = bool(frames) and any(part in frames[0].filename for part in _WAIT_IN)
        (waiting if in_collective else elsewhere).setdefault(where(dump), []).append(rank)
    return waiting, elsewhere


def in_exchange(dump: str, *, or_backward: bool = False) -> bool:
    """Return whether the main thread of a rank is where it can only wait for other ranks, until they come.

    Args:
        or_backward: a backward counts too: it may wait for gradients of other ranks, or compute.
    """
    frames = main_thread(dump)
    files = (*_EXCHANGES, _BACKWARD) if or_backward else _EXCHANGES
    return (
        bool(frames)
        and frames[0].filename.endswith(files)
        and not any(frame.name in _WAITS_WITH_AN_END for frame in frames)
    )
