"""Show the output of ranks where the code that started them would print.

A cell shows as much as a browser draws with ease. The rest goes to a log file, and the cell shows its last lines and a
count, redrawn now and then. Terminals, redirected streams and ``%%capture`` get everything.

Text that cannot be shown as it is, because a console lacks a letter for example, is shown as well as possible.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import tempfile
import time
import uuid
from collections import deque
from operator import itemgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from nb_accelerate.notebook.display.drawing.block import flush, write
from nb_accelerate.notebook.ranks.output.rank_output import last_drawing

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.display.drawing.block import Block
    from nb_accelerate.notebook.protocol.output import StreamName


_TAIL_LINES = 20  # last lines that are shown
_TAIL_WIDTH = 1000  # characters of each that are shown, from its end
_PREFIX = "nb_accelerate-"

_MAX_AGE = 7 * 24 * 3600.0  # seconds from the last write to a log until it is removed
_REDRAW_INTERVAL = 0.5  # seconds between two drawings of the tail


class Overflow:
    """Writes the output of a cell to a log, and draws its last lines; where no log can be written, it says so."""

    def __init__(self) -> None:
        self.due = time.monotonic() + _REDRAW_INTERVAL
        self.has_news = False
        self._id = uuid.uuid4().hex
        self._lines = 0
        self._size = 0
        # The last lines. The last of them is not finished: what is written next continues it.
        self._tail: deque[str] = deque([""], maxlen=_TAIL_LINES + 1)
        self._path: Path | None = None
        self._file: IO[str] | None = None
        self._problem = ""
        try:
            self._path, self._file = new_log()
        except OSError as error:
            self._problem = f"no log can be written ({error})"

    def write(self, text: str) -> None:
        """Write text to the log, and keep its last lines."""
        self.has_news = True
        self._lines += text.count("\n")
        self._size += len(text)
        begun = self._tail.pop() if self._tail else ""
        for line in (begun + text).split("\n")[-_TAIL_LINES - 1 :]:
            shown = last_drawing(line)
            self._tail.append(shown if len(shown) <= _TAIL_WIDTH else "... " + shown[-_TAIL_WIDTH:])
        if self._file is not None:
            try:
                self._file.write(text)
            except OSError as error:
                self._give_up(error)

    def drawing(self, lines: int, size: int) -> dict[str, Any]:
        """Return the content of the Jupyter message that shows it. The cell shows so many lines or characters."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)
        self.has_news = False
        self.due = time.monotonic() + _REDRAW_INTERVAL
        if self._lines > lines:
            head = f"... {self._lines - lines:,} more lines; " + self._place_of_log(f"all {self._lines:,} are")
        else:
            head = f"... {self._size - size:,} more characters; " + self._place_of_log(f"all {self._size:,} are")
        tail = "\n".join(list(self._tail)[-_TAIL_LINES - (not self._tail[-1]) :])
        return {
            "data": {"text/plain": f"{head}. The last ones:\n{tail}".rstrip("\n")},
            "metadata": {},
            "transient": {"display_id": self._id},
        }

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _place_of_log(self, all_are: str) -> str:
        if self._problem:
            return self._problem
        return f"{all_are} in {self._path}"

    def _give_up(self, error: OSError) -> None:
        """Stop writing the log, because the disk is full for example. What was written stays."""
        self._problem = f"the log {self._path} ends where it could not be written any more ({error.strerror})"
        self.close()
        self._file = None


def new_log() -> tuple[Path, IO[str]]:
    """Open a new log file, remove old ones of this user, and return its path and the file. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=time.strftime(f"{_PREFIX}%Y%m%d-%H%M%S-"), suffix=".log")
    oldest = time.time() - _MAX_AGE
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*.log"):
        with contextlib.suppress(OSError):  # somebody else has just removed it
            found = path.lstat()
            if found.st_uid == os.geteuid() and found.st_mtime < oldest:
                path.unlink()
    return Path(name), os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace")


# Seconds for which text is gathered before it is sent: many small messages cost the front end more than one.
_MAX_DELAY = 0.05

_MIN_SIZE = 1 << 15  # characters that are sent without waiting for more

LINE_LIMIT = 5000  # lines that a cell shows in full

SIZE_LIMIT = 1 << 20  # characters that a cell shows in full


class Sink(Protocol):
    """Shows what it is given.

    Attributes:
        due: `time.monotonic` at which `flush` should be called.
        own_stream: the stream for lines of this package's own that tell nothing bad. Not stderr in a notebook, which
            draws that in red; stderr elsewhere, so that stdout has what the ranks print and nothing else.
    """

    due: float
    own_stream: StreamName = "stdout"

    def write(self, stream: StreamName, text: str) -> None:
        """Show text of a stream: whole lines, or anything at all if there is only one rank."""

    def display(self, kind: str, content: dict[str, Any]) -> None:
        """Show a display: a Jupyter message ``display_data``, ``update_display_data`` or ``clear_output``."""

    def flush(self) -> None:
        """Show what was gathered."""

    def close(self) -> None:
        """Show everything that was gathered. Nothing follows."""


def sink_here() -> Sink:
    """Return a sink that shows output where the code that runs now would print."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    kernel = getattr(shell, "kernel", None)
    return StreamSink() if kernel is None else CellSink(kernel)


def say_here() -> Callable[[str], None]:
    """Return a function that shows a line of this package's own where the code that runs now would print."""
    sink = sink_here()

    def say(line: str) -> None:
        sink.write("stderr", line + "\n")
        sink.flush()

    return say


class StreamSink(Sink):
    """Prints to the streams of this process."""

    due = float("inf")
    own_stream: StreamName = "stderr"
    block: Block | None = None  # lines that are kept below the output in a terminal; None if there are none.

    @override
    def write(self, stream: StreamName, text: str) -> None:
        if self.block is not None:
            self.block.hide()
        self._print(sys.stdout if stream == "stdout" else sys.stderr, text)
        if self.block is not None and text.endswith("\n"):
            self.block.show()

    @override
    def display(self, kind: str, content: dict[str, Any]) -> None:
        text = content.get("data", {}).get("text/plain")
        if text is not None:
            self._print(sys.stdout, f"{text}\n")

    def _print(self, stream: IO[str] | None, text: str) -> None:
        write(stream, text)

    @override
    def flush(self) -> None:
        pass

    @override
    def close(self) -> None:
        flush(sys.stdout)
        flush(sys.stderr)


class CellSink(Sink):
    """Shows output in the cell that runs when the sink is made, also when that has ended. For any thread.

    What the cell has redirected, with ``%%capture`` or `contextlib.redirect_stdout`, goes where its own prints go.
    """

    def __init__(self, kernel: Any) -> None:
        self.due = float("inf")
        self._is_first = True
        self.kernel = kernel
        self._parent = kernel.get_parent()
        self._redirected: dict[StreamName, Any] = {
            "stdout": _unless_kernels(sys.stdout),
            "stderr": _unless_kernels(sys.stderr),
        }
        from ipykernel.zmqshell import ZMQDisplayPublisher

        # The object that captures the displays of the cell that runs, if there is one.
        publisher = getattr(getattr(kernel, "shell", None), "display_pub", None)
        self._publisher: Any = None if isinstance(publisher, ZMQDisplayPublisher) else publisher
        self._pending: list[tuple[StreamName, str]] = []
        self._pending_size = 0
        self._lines = 0
        self._size = 0
        self._kept: list[str] = []
        self._overflow: Overflow | None = None

    @property
    def is_captured(self) -> bool:
        """Whether ``%%capture``, say, keeps what is displayed: each update too, for ever."""
        return self._publisher is not None

    @override
    def write(self, stream: StreamName, text: str) -> None:
        redirected = self._redirected[stream]
        if redirected is not None:
            self._begin()
            write(redirected, text)
            return
        if self._overflow is not None:
            self._overflow.write(text)
            self.due = self._overflow.due
            return
        text, rest = _cut(text, LINE_LIMIT - self._lines, SIZE_LIMIT - self._size)
        self._lines += text.count("\n")
        self._size += len(text)
        self._kept.append(text)
        self._pending.append((stream, text))
        self._pending_size += len(text)
        if rest:
            self._send_pending()
            self._overflow = Overflow()
            for kept in (*self._kept, rest):
                self._overflow.write(kept)
            self._kept.clear()
            self._send("display_data", self._overflow.drawing(self._lines, self._size))
            self.due = self._overflow.due
        elif self._pending_size >= _MIN_SIZE:
            self.flush()
        elif self.due == float("inf"):
            self.due = time.monotonic() + _MAX_DELAY

    @override
    def display(self, kind: str, content: dict[str, Any]) -> None:
        self._send_pending()
        if self._publisher is None:
            self._send(kind, content)
        else:
            self._publish(kind, content)

    @override
    def flush(self) -> None:
        self._send_pending()
        self.due = float("inf")
        if self._overflow is not None and self._overflow.has_news:
            self._send("update_display_data", self._overflow.drawing(self._lines, self._size))

    @override
    def close(self) -> None:
        self.flush()
        if self._overflow is not None:
            self._overflow.close()
        self.due = float("inf")

    def _send_pending(self) -> None:
        pending, self._pending, self._pending_size = self._pending, [], 0
        for stream, pieces in itertools.groupby(pending, key=itemgetter(0)):
            if text := "".join(text for _, text in pieces):
                self._send("stream", {"name": stream, "text": text})

    def _begin(self) -> None:
        """Before the first output of ranks, flush what the cell itself has printed."""
        if self._is_first:
            self._is_first = False
            flush(sys.stdout)
            flush(sys.stderr)

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        self._begin()
        # sys.stdout would go to the cell that runs now. The socket may be used from any thread.
        send, socket = self.kernel.session.send, self.kernel.iopub_socket
        try:
            send(socket, kind, _sendable(content), parent=self._parent)
        except Exception as error:  # what a rank displays must never end the loop
            text = f"<a message of a rank cannot be sent to the notebook: {type(error).__name__}>\n"
            with contextlib.suppress(Exception):  # the kernel is closing
                send(socket, "stream", {"name": "stderr", "text": text}, parent=self._parent)

    def _publish(self, kind: str, content: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):  # the class is not ours, and may do anything
            if kind == "clear_output":
                self._publisher.clear_output(wait=bool(content.get("wait")))
                return
            self._publisher.publish(
                data=content.get("data"),
                metadata=content.get("metadata"),
                transient=content.get("transient"),
                update=kind == "update_display_data",
            )


def _unless_kernels(stream: Any) -> Any:
    """Return a stream, or None if it is the kernel's own, whose text goes to the cell that runs by then."""
    from ipykernel.iostream import OutStream

    return None if stream is None or isinstance(stream, OutStream) else stream


def _sendable(content: Any) -> Any:
    """Return content without what JSON messages cannot hold: lone surrogates, and floats that are not finite."""
    if isinstance(content, str):
        try:
            content.encode()
        except UnicodeEncodeError:
            return content.encode("utf-8", "backslashreplace").decode()
        return content
    if isinstance(content, dict):
        return {_sendable(key): _sendable(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_sendable(part) for part in content]
    if isinstance(content, float) and not math.isfinite(content):
        return repr(content)
    return content


def _cut(text: str, lines: int, size: int) -> tuple[str, str]:
    """Split text after so many lines or characters, whichever come first."""
    end = len(text)
    if text.count("\n") > lines:
        end = sum(len(line) + 1 for line in text.split("\n", lines)[:lines])
    end = min(end, size)
    return text[:end], text[end:]
