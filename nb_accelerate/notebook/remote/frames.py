"""What the kernel and the host of a machine tell each other: frames, over one stream of bytes in each direction.

::

    kind (1 byte) | rank (4, signed; -1: the machine) | length (8) | body | tag of a seal, if the stream has one

A host writes `MAGIC` before its first frame. What comes before that is what a login script has printed.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from nb_accelerate.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAGIC = b"\n--nb-accelerate-host 1--\n"
"""Comes before the first frame of a host. The number is the version of what follows."""

MACHINE = -1
"""In the place of a rank: the frame is about the whole machine."""

MAX_BODY = 1 << 30
"""Bytes of a body, at most. More means that what is read are no frames."""

_MAX_PREAMBLE = 1 << 12
"""Bytes before `MAGIC` that are kept, at most: the last ones."""

_HEADER = struct.Struct("!BiQ")

Bytes: TypeAlias = bytes | bytearray | memoryview
"""A piece of what is sent, which is not copied."""


class LinkError(LaunchError):
    """What came over the stream of a machine are no frames, or not those that were sent."""


class Kind(enum.IntEnum):
    """What a frame is about. Those to the host say what to do, those from it what has happened."""

    HELLO = 1
    """From the host, first: what this machine is, as JSON."""
    BEAT = 2
    """Every second, both ways: a clock (`struct` ``!d``, seconds of the epoch)."""
    QUIT = 3
    """To the host: end all ranks and yourself."""
    PREPARE = 4
    """To the host: environment, folder and search path of its ranks, as JSON. From it: what it does not have."""
    START = 5
    """To the host: start a rank; its mark."""
    SIGNAL = 6
    """To the host: number of a signal for a rank, 4 bytes."""
    MESSAGE = 7
    """Both ways: a pickled message, passed on untouched; see `message_body`."""
    SEGMENT = 8
    """Both ways: a piece of the content of a descriptor that a later message comes with; see `segment_body`."""
    DROP = 9
    """To the host: a segment that no other message comes with."""
    STDOUT = 10
    """From the host: bytes of a rank's stdout."""
    STDERR = 11
    """From the host: bytes of a rank's stderr."""
    STACKS = 12
    """From the host: bytes that a rank writes about its stack."""
    PAGE = 13
    """From the host: changed pieces of a rank's progress page."""
    COMMAND = 14
    """To the host: changed pieces of a rank's progress page, which the notebook writes."""
    END = 15
    """From the host: how a rank has ended, as JSON. No other frame of this rank follows."""
    ASK = 16
    """To the host: call a method of the handle of a rank, by its name."""
    FACTS = 17
    """Both ways: ask about a machine or rank, and the answer, as JSON."""
    BRIDGE = 18
    """Both ways: bytes of a socket that a message came with."""


class Frame(NamedTuple):
    """A frame that has come."""

    kind: int
    rank: int
    body: bytes


class Seal(Protocol):
    """A keyed checksum of what goes in one direction of a stream, which also counts.

    Attributes:
        size: bytes of a tag.
    """

    size: int

    def tag(self, data: Sequence[Bytes]) -> bytes:
        """Return the tag of the next frame that is sent."""

    def check(self, data: Sequence[Bytes], tag: bytes) -> None:
        """Check the tag of the next frame that has come.

        Raises:
            LinkError: it is not that of this frame at this place.
        """


class FrameWriter:
    """Makes the bytes of frames of one direction, in the order in which they are sent."""

    def __init__(self, seal: Seal | None = None) -> None:
        self._seal = seal

    def frame(self, kind: int, rank: int, *parts: Bytes) -> list[Bytes]:
        """Return the pieces of a frame, whose body is the parts one after the other; nothing large is copied."""
        length = sum(memoryview(part).nbytes for part in parts)
        pieces = [_HEADER.pack(kind, rank, length), *parts]
        return pieces if self._seal is None else [*pieces, self._seal.tag(pieces)]


class FrameParser:
    """Finds frames in the bytes of one direction, however these are cut.

    Args:
        has_preamble: `MAGIC` comes before the first frame, as from a host.

    Attributes:
        preamble: the last bytes before `MAGIC`.
        is_open: whether `MAGIC` has come.
    """

    def __init__(self, seal: Seal | None = None, *, has_preamble: bool = False) -> None:
        self.preamble = b""
        self.is_open = not has_preamble
        self._seal = seal
        self._data = bytearray()

    def feed(self, data: Bytes) -> None:
        """Take bytes that have come."""
        self._data += data
        if not self.is_open:
            self._find_magic()

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames that are complete.

        Raises:
            LinkError: these are no frames, or others than were sent.
        """
        while self.is_open and (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | None:
        if len(self._data) < _HEADER.size:
            return None
        kind, rank, length = _HEADER.unpack_from(self._data)
        if length > MAX_BODY:
            raise LinkError(f"a frame of {length} bytes was announced: these are no frames")
        end = _HEADER.size + length
        size = 0 if self._seal is None else self._seal.size
        if len(self._data) < end + size:
            return None
        with memoryview(self._data) as data:
            body, tag = bytes(data[_HEADER.size : end]), bytes(data[end : end + size])
        if self._seal is not None:
            self._seal.check((self._data[: _HEADER.size], body), tag)
        del self._data[: end + size]
        return Frame(kind, rank, body)

    def _find_magic(self) -> None:
        place = self._data.find(MAGIC)
        if place < 0:
            kept = max(_MAX_PREAMBLE, len(MAGIC))
            del self._data[:-kept]
            self.preamble = bytes(self._data)
            return
        self.preamble = bytes(self._data[max(0, place - _MAX_PREAMBLE) : place])
        del self._data[: place + len(MAGIC)]
        self.is_open = True
