"""A progress page of another machine, and what is sent so that both copies say the same.

::

    rank --> page on its machine --> `PageWatch.changed` ......> `PageMirror.take` --> the notebook reads
    rank <-- page on its machine <-- `PageWatch.write` <.......> `PageMirror.write` <-- the notebook writes

What the notebook writes is in both copies then, so that it is not sent back.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.base.progress_page import PageReader, layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nb_accelerate.notebook.remote.frames import Bytes

    # Bytes, each with its place on a page, in the order in which they are to be written.
    Pieces = Iterable[tuple[int, bytes]]

_BLOCK = 256  # bytes that are compared together

_BAR_TIMES = struct.Struct("=dd")
_BAR_TIMES_AT = struct.calcsize("=qqdd")


_PIECE = struct.Struct("!II")


def pack_pieces(pieces: Iterable[tuple[int, Bytes]]) -> bytes:
    """Return pieces of a memory, each with its place, in the order in which they are to be written."""
    return b"".join(_PIECE.pack(at, len(data)) + data for at, data in pieces)


def unpack_pieces(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield what `pack_pieces` was given."""
    at = 0
    while at < len(body):
        place, length = _PIECE.unpack_from(body, at)
        at += _PIECE.size + length
        yield place, body[at - length : at]


class PageWatch:
    """Finds what has changed on a page since it was looked at last."""

    def __init__(self, page: PageReader) -> None:
        self._page = page
        self._seen = bytearray(layout.SIZE)

    def changed(self) -> list[tuple[int, bytes]]:
        """Return the words that have changed. One that only the notebook has written is not among them."""
        now = self._page.copy()
        if now == self._seen:
            return []
        word = layout.WORD.size
        pieces = [
            (at, now[at : at + word])
            for block in range(0, layout.SIZE, _BLOCK)
            if now[block : block + _BLOCK] != self._seen[block : block + _BLOCK]
            for at in range(block, block + _BLOCK, word)
            if now[at : at + word] != self._seen[at : at + word]
        ]
        self._seen[:] = now
        return pieces

    def write(self, pieces: Pieces) -> None:
        for at, data in pieces:
            self._page.write([(at, data)])
            self._seen[at : at + len(data)] = data


class PageMirror(PageReader):
    """The notebook's copy of a page.

    Args:
        send: sends pieces that the notebook writes.
    """

    def __init__(self, send: Callable[[Pieces], object]) -> None:
        super().__init__()
        self._send = send
        self._raw = bytearray(layout.SIZE)  # with times of the other machine's clock

    def take(self, pieces: Pieces, *, ahead: float) -> None:
        """Take what has changed on the other machine.

        Args:
            ahead: seconds by which `time.monotonic` of this machine is ahead of that one's.
        """
        for at, data in pieces:
            self._raw[at : at + len(data)] = data
            super().write([(at, data)])
        since: int = layout.WORD.unpack_from(self._raw, 8 * layout.SINCE)[0]
        layout.WORD.pack_into(self.buffer, 8 * layout.SINCE, since + int(ahead * 1e9) if since else 0)
        for place in range(layout.BARS_AT + _BAR_TIMES_AT, layout.SIZE, layout.BAR.size):
            began, changed = _BAR_TIMES.unpack_from(self._raw, place)
            _BAR_TIMES.pack_into(self.buffer, place, began + ahead, changed + ahead)

    @override
    def write(self, pieces: Pieces) -> None:
        pieces = tuple(pieces)
        super().write(pieces)
        self._send(pieces)
