"""Where the output of a launch goes: into the cell that launched it, and nowhere else.

A cell gets as many lines as a browser draws with ease. After that everything goes to a file, and the cell shows
the last lines and a count, redrawn now and then. A terminal or a file that a script writes to takes everything.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid
from collections import deque
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from typing_extensions import override

if TYPE_CHECKING:
    from nb_accelerate.display.block import Block
    from nb_accelerate.protocol.output import StreamName

_FLUSH_AFTER = 0.05
"""Seconds. Many small messages cost the front end more than one: every message is an output of its own to nbclient."""

_FLUSH_SIZE = 1 << 15
"""Characters."""

LINE_LIMIT = 5000
"""Lines a cell shows in full."""

_TAIL_LINES = 20
_REDRAW_AFTER = 0.5
"""Seconds between two drawings of the tail."""


class Sink(Protocol):
    """Takes whole lines. `due` is the `time.monotonic` at which it wants `flush` to be called."""

    due: float

    def write(self, stream: StreamName, text: str) -> None:
        """Take some lines."""

    def display(self, kind: str, content: dict[str, Any]) -> None:
        """Take something rich.

        Args:
            kind: ``display_data``, ``update_display_data`` or ``clear_output``.
            content: as in the Jupyter message.
        """

    def flush(self) -> None:
        """Show what was kept back."""

    def close(self) -> None:
        """Nothing will follow."""


def sink_here() -> Sink:
    """The place where the code that is running now would print to."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    kernel = getattr(shell, "kernel", None)
    return StreamSink() if kernel is None else CellSink(kernel)


class StreamSink(Sink):
    """The streams of this process.

    Attributes:
        block: lines that stay at the bottom of the terminal, if there are any.
    """

    due = float("inf")
    block: Block | None = None

    @override
    def write(self, stream: StreamName, text: str) -> None:
        if self.block is not None:
            self.block.hide()
        (sys.stdout if stream == "stdout" else sys.stderr).write(text)
        if self.block is not None and text.endswith("\n"):
            self.block.show()

    @override
    def display(self, kind: str, content: dict[str, Any]) -> None:
        text = content.get("data", {}).get("text/plain")
        if text is not None:
            sys.stdout.write(f"{text}\n")

    @override
    def flush(self) -> None:
        pass

    @override
    def close(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()


class CellSink(Sink):
    """The cell that runs when this is made, also after another cell has begun, from any thread."""

    def __init__(self, kernel: Any, line_limit: int = LINE_LIMIT) -> None:
        self.due = float("inf")
        self._is_first = True
        self.kernel = kernel
        self._parent = kernel.get_parent()
        self._pending: list[tuple[StreamName, str]] = []
        self._size = 0
        self._shown = 0
        self._line_limit = line_limit
        self._kept: list[str] = []
        self._overflow: _Overflow | None = None

    @override
    def write(self, stream: StreamName, text: str) -> None:
        if self._overflow is not None:
            self._overflow.write(text)
            self.due = self._overflow.due
            return
        text, rest = _cut(text, self._line_limit - self._shown)
        self._shown += text.count("\n")
        self._kept.append(text)
        self._pending.append((stream, text))
        self._size += len(text)
        if rest:
            self._start_overflow(rest)
        elif self._size >= _FLUSH_SIZE:
            self.flush()
        elif self.due == float("inf"):
            self.due = time.monotonic() + _FLUSH_AFTER

    @override
    def display(self, kind: str, content: dict[str, Any]) -> None:
        self._send_pending()
        self._send(kind, content)

    @override
    def flush(self) -> None:
        self._send_pending()
        self.due = float("inf")
        if self._overflow is not None and self._overflow.has_news:
            self._send("update_display_data", self._overflow.drawing(self._line_limit))

    @override
    def close(self) -> None:
        self.flush()
        if self._overflow is not None:
            self._overflow.close()
        self.due = float("inf")

    def _start_overflow(self, rest: str) -> None:
        self._send_pending()
        self._overflow = _Overflow()
        for text in (*self._kept, rest):
            self._overflow.write(text)
        self._kept.clear()
        self._send("display_data", self._overflow.drawing(self._line_limit))
        self.due = self._overflow.due

    def _send_pending(self) -> None:
        merged: list[tuple[StreamName, list[str]]] = []
        for stream, text in self._pending:
            if not merged or merged[-1][0] != stream:
                merged.append((stream, []))
            merged[-1][1].append(text)
        self._pending.clear()
        self._size = 0
        for stream, texts in merged:
            if any(texts):
                self._send("stream", {"name": stream, "text": "".join(texts)})

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        if self._is_first:  # what the cell itself has printed comes before; a cell that prints nothing need not wait
            self._is_first = False
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        # Not through sys.stdout: that goes to the cell that runs now. The socket may be used from any thread.
        self.kernel.session.send(self.kernel.iopub_socket, kind, content, parent=self._parent)


def _cut(text: str, lines: int) -> tuple[str, str]:
    """The first `lines` lines of `text`, and what follows them."""
    if text.count("\n") <= lines:
        return text, ""
    *first, rest = text.split("\n", lines)
    return "".join(line + "\n" for line in first), rest


class _Overflow:
    """Everything, in a file; the last lines and a count, as a display that is redrawn."""

    def __init__(self) -> None:
        folder = Path(tempfile.gettempdir()) / f"nb_accelerate-logs-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self.path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}.log"
        self._file: IO[str] = self.path.open("x", encoding="utf-8", errors="backslashreplace")
        self._id = uuid.uuid4().hex
        self._lines = 0
        self.has_news = False
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.due = time.monotonic() + _REDRAW_AFTER

    def write(self, text: str) -> None:
        self.has_news = True
        self._file.write(text)
        self._lines += text.count("\n")
        self._tail.extend(text.splitlines(keepends=True)[-_TAIL_LINES:])

    def drawing(self, shown: int) -> dict[str, Any]:
        self._file.flush()
        self.has_news = False
        self.due = time.monotonic() + _REDRAW_AFTER
        head = f"... {self._lines - shown:,} more lines; all {self._lines:,} are in {self.path}. The last ones:\n"
        return {
            "data": {"text/plain": head + "".join(self._tail).rstrip("\n")},
            "metadata": {},
            "transient": {"display_id": self._id},
        }

    def close(self) -> None:
        self._file.close()
