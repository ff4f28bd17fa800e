r"""The format of the pipe that carries all that a rank prints, in the order it printed it.

A rank's file descriptor 1 is a pipe to the kernel. ``sys.stdout`` and C code write to it as they are;
``sys.stderr`` writes to the *same* pipe inside small frames, so that the two keep their order::

    plain bytes ... | mark | kind | length | bytes for stderr | plain bytes ...

So does what one rank prints for all (``accelerator.print``), which is shown without the number of the rank.
An empty frame of the kind `DISPLAY` marks the place of something rich (a figure, say), whose data was sent over the
rank's channel before the frame was written. One of the kind `RECORD` carries values that were logged, as JSON.

The mark is 16 bytes, new for every rank, all but the first of them random, so that no output can be taken for a frame.
Its first byte never occurs in UTF-8: the end of a piece of text is never the beginning of a mark, which would have to
be kept back until more comes. A frame is at most
`PIPE_BUF` long: the kernel of the operating system never mixes such a write with another writer's. C code
that writes to descriptor 2 has a pipe of its own; only its order relative to the rest is approximate.

Because each write goes to a pipe at once, what a rank wrote last is there after it was killed.
"""

from __future__ import annotations

import os
import select
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

# Where text was printed. What is ``for_all`` belongs on stdout; one rank has printed it for all of them. Lines of
# ``note`` are this package's own, and information: see `training.process.notes`.
StreamName = Literal["stdout", "stderr", "for_all", "note"]

Kind = Literal["stderr", "display", "record", "for_all", "note"]

MARK_SIZE = 16
_FIELDS = struct.Struct("!BH")
_KINDS: tuple[Kind, ...] = ("stderr", "display", "record", "for_all", "note")
_HEAD = MARK_SIZE + _FIELDS.size
MAX_PAYLOAD = select.PIPE_BUF - _HEAD  # bytes of text one frame can carry


@dataclass(frozen=True)
class Chunk:
    """Bytes of one stream, the position of a display, or a record of logged values."""

    stream: StreamName | Literal["display", "record"]
    data: bytes


def new_mark() -> bytes:
    return b"\xff" + os.urandom(MARK_SIZE - 1)


def frame(mark: bytes, payload: bytes | memoryview, kind: Kind = "stderr") -> bytes:
    """Return a frame, to be written in one call. The payload has at most `MAX_PAYLOAD` bytes."""
    return mark + _FIELDS.pack(_KINDS.index(kind), len(payload)) + bytes(payload)


class Decoder:
    """Splits what is read from the pipe into chunks."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """Yield the chunks that the next bytes of the pipe complete."""
        data = self._rest + data
        self._rest = b""
        position = 0
        while True:
            start = data.find(self._mark, position)
            if start < 0:
                end = len(data) - self._tail(data, position)
                if end > position:
                    yield Chunk("stdout", data[position:end])
                self._rest = data[end:]
                return
            if start > position:
                yield Chunk("stdout", data[position:start])
            end = start + _HEAD
            kind = 0
            if len(data) >= end:
                kind, length = _FIELDS.unpack_from(data, start + MARK_SIZE)
                end += length
            if len(data) < end or len(data) < start + _HEAD:
                self._rest = data[start:]
                return
            yield Chunk(_KINDS[kind], data[start + _HEAD : end])
            position = end

    def _tail(self, data: bytes, position: int) -> int:
        """Return how many bytes at the end of `data` are a beginning of the mark."""
        for length in range(min(MARK_SIZE - 1, len(data) - position), 0, -1):
            if self._mark.startswith(data[-length:]):
                return length
        return 0
