"""Send what a rank prints to the kernel: replace its streams, and descriptors 0, 1 and 2.

This is the first thing a rank does. A stream inherited from a kernel belongs to the kernel: writing to it mixes
lines of several ranks, and can hang for ever on a lock that another thread held when the process forked.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from nb_accelerate.notebook.protocol.output import MAX_PAYLOAD, frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from nb_accelerate.notebook.protocol.output import Kind

_ENCODING, _ERRORS = "utf-8", "backslashreplace"


class _Frames(io.RawIOBase):
    """Writes to descriptor 1, in frames of one kind. C code and subprocesses write to the descriptor `fd` instead."""

    def __init__(self, mark: bytes, kind: Kind, fd: int) -> None:
        self._mark, self._kind, self._fd = mark, kind, fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        # subprocess.run(stderr=sys.stderr) and faulthandler write to it: descriptor 2 is a pipe to the kernel too.
        return self._fd

    def write(self, data: Buffer, /) -> int:
        payload = memoryview(data).cast("B")[:MAX_PAYLOAD]
        os.write(1, frame(self._mark, payload, self._kind))
        return len(payload)


class _AtOnce(io.BufferedWriter):
    """Flushes each write, so that bytes and text keep their order."""

    def write(self, data: Buffer, /) -> int:
        size = super().write(data)
        self.flush()
        return size


class _RankStream(io.TextIOWrapper):
    """A text stream without a buffer: what was printed survives a crash on the next line.

    Text is written to the descriptor without the layers between, which costs a third. Threads do not write into each
    other's lines, however long.
    """

    for_all: _RankStream | None = None  # a stream for what is printed on one rank for all of them

    notes: _RankStream | None = None  # a stream for lines of this package that are information

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(_AtOnce(raw), _ENCODING, _ERRORS)
        self._raw = raw
        self.renew_lock()

    def renew_lock(self) -> None:
        """Replace the lock, in a forked process: the thread that held it may not be there."""
        self._lock = threading.RLock()

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            return super().write(text)  # it raises the TypeError
        data = text.encode(_ENCODING, _ERRORS)
        with self._lock:
            while data:
                data = data[self._raw.write(data) :]
        return len(text)


def send_record(mark: bytes, record: bytes) -> None:
    """Send logged values as JSON, at most `MAX_PAYLOAD` bytes, in their order among what is printed."""
    os.write(1, frame(mark, record, "record"))


def replace_streams(stdout: int, stderr: int, mark: bytes) -> None:
    """Make descriptors 1 and 2, which are taken over, and Python's streams those of this rank. Nothing can be read."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]
    builtins.input = _no_input
    out = _RankStream(io.FileIO(1, "w", closefd=False))
    err = _RankStream(_Frames(mark, "stderr", 2))
    out.for_all = _RankStream(_Frames(mark, "for_all", 1))
    out.notes = _RankStream(_Frames(mark, "note", 1))
    for stream in (out, err, out.for_all, out.notes):
        os.register_at_fork(after_in_child=stream.renew_lock)
    sys.stdout = sys.__stdout__ = out  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = err  # type: ignore[misc]
    builtins.print = _print_in_one(builtins.print)


def _no_input(_prompt: object = "", /) -> NoReturn:
    raise EOFError("input() does not work on a rank. Call it in the notebook before, and use its value on the ranks")


def _print_in_one(original: Callable[..., None]) -> Callable[..., None]:
    """Return a `print` that writes a line in one system call. Python's own writes the newline in a second one."""

    @functools.wraps(original)
    def print(  # noqa: A001 - it takes its place, and is pickled by its name
        *values: object, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False
    ) -> None:
        if file is not None or sys.stdout is None or not (isinstance(sep, str) and isinstance(end, str)):
            original(*values, sep=sep, end=end, file=file, flush=flush)
            return
        sys.stdout.write(sep.join(map(str, values)) + end)
        if flush:
            sys.stdout.flush()

    return print
