"""What a rank prints goes to the kernel: replaces streams and descriptors 0, 1 and 2.

This is the first thing a rank does. A stream inherited from a kernel belongs to the kernel: writing to it mixes
lines of several ranks, and can hang for ever on a lock that another thread held when the process forked.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

from nb_accelerate.protocol.output import MAX_PAYLOAD, frame

if TYPE_CHECKING:
    from typing_extensions import Buffer


class _StderrFrames(io.RawIOBase):
    """Writes to descriptor 1, in frames, what is meant for stderr."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        # For subprocess.run(stderr=sys.stderr) and faulthandler: descriptor 2 is a pipe to the kernel too.
        return 2

    def write(self, data: Buffer, /) -> int:
        payload = memoryview(data).cast("B")[:MAX_PAYLOAD]
        os.write(1, frame(self._mark, payload))
        return len(payload)


class _RankStream(io.TextIOWrapper):
    """A text stream that is flushed after every write: what was printed survives a crash on the next line."""

    def write(self, text: str, /) -> int:
        written = super().write(text)
        self.flush()
        return written


def send_record(mark: bytes, record: bytes) -> None:
    """Send something to be kept, in its place among what is printed."""
    os.write(1, frame(mark, record, "record"))


def replace_streams(stdout: int, stderr: int, mark: bytes) -> None:
    """Make descriptors 1 and 2 and Python's streams those of this rank; there is no standard input.

    Args:
        stdout: write end of the rank's main pipe; taken over.
        stderr: write end of the pipe for C code's stderr; taken over.
        mark: the mark of frames, see `nb_accelerate.protocol.output`.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]
    out = _RankStream(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "backslashreplace")
    err = _RankStream(io.BufferedWriter(_StderrFrames(mark)), "utf-8", "backslashreplace")
    sys.stdout = sys.__stdout__ = out  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = err  # type: ignore[misc]
