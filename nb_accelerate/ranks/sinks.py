"""Where the output of ranks goes: to where the code that started them would print.

A cell gets as much as a browser draws with ease. After that everything goes to a file, and the cell shows the last
lines and a count, redrawn now and then. A terminal, a file that a script writes to, and what ``%%capture`` or
``contextlib.redirect_stdout`` collect take everything.

Output that cannot be shown as it is, since a console knows no such letter or nobody reads any more, is shown as well
as can be: it never ends what watches over the ranks.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from typing import IO, TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from nb_accelerate.display import console
from nb_accelerate.ranks.overflow import Overflow

if TYPE_CHECKING:
    from nb_accelerate.display.block import Block
    from nb_accelerate.protocol.output import StreamName

_FLUSH_AFTER = 0.05
"""Seconds that output is gathered: many small messages cost the front end more than one."""

_FLUSH_SIZE = 1 << 15
"""Characters that are sent without waiting for more."""

LINE_LIMIT = 5000
"""Lines a cell shows in full."""

SIZE_LIMIT = 1 << 20
"""Characters a cell shows in full."""


class Sink(Protocol):
    """Takes whole lines. `due` is the `time.monotonic` at which it wants `flush` to be called."""

    due: float

    def write(self, stream: StreamName, text: str) -> None:
        """Take whole lines of one stream."""

    def display(self, kind: str, content: dict[str, Any]) -> None:
        """Take something rich.

        Args:
            kind: ``display_data``, ``update_display_data`` or ``clear_output``.
            content: as in the Jupyter message.
        """

    def flush(self) -> None:
        """Show what was kept back."""

    def close(self) -> None:
        """Show everything: nothing will follow."""


def sink_here() -> Sink:
    """Make the sink for what the code that runs now starts."""
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
        self._print(sys.stdout if stream == "stdout" else sys.stderr, text)
        if self.block is not None and text.endswith("\n"):
            self.block.show()

    @override
    def display(self, kind: str, content: dict[str, Any]) -> None:
        text = content.get("data", {}).get("text/plain")
        if text is not None:
            self._print(sys.stdout, f"{text}\n")

    @override
    def flush(self) -> None:
        pass

    def _print(self, stream: IO[str] | None, text: str) -> None:
        console.write(stream, text)

    @override
    def close(self) -> None:
        console.flush(sys.stdout)
        console.flush(sys.stderr)


class CellSink(Sink):
    """The cell that runs when this is made, also after another cell has begun, from any thread.

    What that cell has redirected, with ``%%capture`` or `contextlib.redirect_stdout`, goes where its own prints go.
    """

    def __init__(self, kernel: Any, line_limit: int = LINE_LIMIT, size_limit: int = SIZE_LIMIT) -> None:
        self.due = float("inf")
        self._is_first = True
        self.kernel = kernel
        self._parent = kernel.get_parent()
        self._redirected: dict[StreamName, Any] = {
            "stdout": _unless_kernels(sys.stdout),
            "stderr": _unless_kernels(sys.stderr),
        }
        self._publisher = _capturing_publisher(kernel)
        self._pending: list[tuple[StreamName, str]] = []
        self._pending_size = 0
        self._lines = 0
        self._size = 0
        self._line_limit = line_limit
        self._size_limit = size_limit
        self._kept: list[str] = []
        self._overflow: Overflow | None = None

    @override
    def write(self, stream: StreamName, text: str) -> None:
        redirected = self._redirected[stream]
        if redirected is not None:
            self._begin()
            console.write(redirected, text)
            return
        if self._overflow is not None:
            self._overflow.write(text)
            self.due = self._overflow.due
            return
        text, rest = _cut(text, self._line_limit - self._lines, self._size_limit - self._size)
        self._lines += text.count("\n")
        self._size += len(text)
        self._kept.append(text)
        self._pending.append((stream, text))
        self._pending_size += len(text)
        if rest:
            self._start_overflow(rest)
        elif self._pending_size >= _FLUSH_SIZE:
            self.flush()
        elif self.due == float("inf"):
            self.due = time.monotonic() + _FLUSH_AFTER

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

    def _start_overflow(self, rest: str) -> None:
        self._send_pending()
        self._overflow = Overflow()
        for text in (*self._kept, rest):
            self._overflow.write(text)
        self._kept.clear()
        self._send("display_data", self._overflow.drawing(self._lines, self._size))
        self.due = self._overflow.due

    def _send_pending(self) -> None:
        merged: list[tuple[StreamName, list[str]]] = []
        for stream, text in self._pending:
            if not merged or merged[-1][0] != stream:
                merged.append((stream, []))
            merged[-1][1].append(text)
        self._pending.clear()
        self._pending_size = 0
        for stream, texts in merged:
            if any(texts):
                self._send("stream", {"name": stream, "text": "".join(texts)})

    def _begin(self) -> None:
        """Flush what the cell itself has printed, before the first output of ranks."""
        if self._is_first:
            self._is_first = False
            console.flush(sys.stdout)
            console.flush(sys.stderr)

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        self._begin()
        # Not through sys.stdout: that goes to the cell that runs now. The socket may be used from any thread.
        send, socket = self.kernel.session.send, self.kernel.iopub_socket
        try:
            send(socket, kind, _sendable(content), parent=self._parent)
        except Exception as error:  # whatever a rank has shown, it must not end what watches over the ranks
            text = f"<a message of a rank cannot be sent to the notebook: {type(error).__name__}>\n"
            with contextlib.suppress(Exception):  # the kernel is closing
                send(socket, "stream", {"name": "stderr", "text": text}, parent=self._parent)

    def _publish(self, kind: str, content: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):  # it is somebody else's class
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
    """The stream, or None if it is the kernel's own, whose text goes to the cell that runs."""
    from ipykernel.iostream import OutStream

    return None if stream is None or isinstance(stream, OutStream) else stream


def _capturing_publisher(kernel: Any) -> Any:
    """What takes the displays of the cell that runs, if that is not the kernel's own publisher."""
    from ipykernel.zmqshell import ZMQDisplayPublisher

    publisher = getattr(getattr(kernel, "shell", None), "display_pub", None)
    return None if publisher is None or isinstance(publisher, ZMQDisplayPublisher) else publisher


def _sendable(content: Any) -> Any:
    """The same without what no message can carry: halves of letters (lone surrogates), and what is no number."""
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
    """As much of `text` as is at most so many lines and characters, and what follows."""
    end = len(text)
    if text.count("\n") > lines:
        end = sum(len(line) + 1 for line in text.split("\n", lines)[:lines])
    end = min(end, size)
    return text[:end], text[end:]
