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
    from collections.abc import Iterable, Iterator, Sequence

MAGIC = b"\n--nb-accelerate-host 1--\n"
"""Comes before the first frame of a host. The number is the version of what follows."""

MACHINE = -1
"""In the place of a rank: the frame is about the whole machine."""

MAX_BODY = 1 << 30
"""Bytes of a body, at most. More means that what is read are no frames."""

_MAX_PREAMBLE = 1 << 12
"""Bytes before `MAGIC` that are kept, at most: the last ones."""

_HEADER = struct.Struct("!BiQ")

BEAT = struct.Struct("!d")
NUMBER = struct.Struct("!Q")

_COUNT = struct.Struct("!B")
_DESCRIPTOR = struct.Struct("!BQ")
_PIECE = struct.Struct("!II")

Bytes: TypeAlias = bytes | bytearray | memoryview
"""A piece of what is sent, which is not copied."""


class LinkError(LaunchError):
    """What came over the stream of a machine are no frames, or not those that were sent."""


class Kind(enum.IntEnum):
    """What a frame is about. Those to the host say what to do, those from it what has happened."""

    HELLO = 1
    """From the host, first: what this machine is, as JSON."""
    BEAT = 2
    """Both ways, every second: the `time.monotonic` of who sends it, as `BEAT`."""
    QUIT = 3
    """To the host: end all ranks and yourself."""
    ASK = 4
    """To the host: a question, as JSON: its ``number``, the name ``what`` is asked, and the arguments."""
    ANSWER = 5
    """From the host: the answer, as JSON, with the ``number`` of the question."""
    START = 6
    """To the host: start a rank, as JSON. The number in place of the rank is that of its handle, used once."""
    PID = 7
    """To the host: the process id of a rank, which it has told the kernel, as `NUMBER`."""
    SIGNAL = 8
    """To the host: a signal for a rank, as `NUMBER`."""
    POKE = 9
    """To the host: bytes for the socket over which a rank is asked for its stack or line."""
    MESSAGE = 10
    """Both ways: a pickled message, passed on untouched, behind its descriptors: see `pack_message`."""
    HAND_ON = 11
    """From the host: what a rank has printed before the messages that have come, has come too."""
    SEGMENT = 12
    """Both ways: `NUMBER` of a segment, and the next piece of its content. Then comes a message with it."""
    DROP = 13
    """To the host: `NUMBER` of a segment that no other message comes with."""
    STDOUT = 14
    """From the host: what a rank has written to its stdout."""
    STDERR = 15
    """From the host: what C code of a rank has written to its stderr."""
    STACKS = 16
    """From the host: what a rank has written about its stack."""
    PAGE = 17
    """Both ways: changed pieces of the progress page of a rank; see `pack_pieces`."""
    END = 18
    """From the host: a rank has ended, as JSON: its ``exitcode`` or null, and why that is not known (``lost``). It is
    the last frame about this rank."""
    FACTS = 19
    """From the host: what is known about the process of a rank, as JSON. To it: look now."""
    BRIDGE = 20
    """Both ways: `NUMBER` of a socket that a message came with, and bytes that came out of its other end."""


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


class Descriptor(NamedTuple):
    """What a descriptor of a message is at the other end of a stream.

    Attributes:
        kind: `SEGMENT`, `SOCKET` or `LISTENER`.
        number: of the segment or socket.
    """

    kind: int
    number: int


SEGMENT, SOCKET, LISTENER = range(3)
"""A file with the same content, a socket whose other end is here, or that on which the host was told to listen."""


def pack_message(descriptors: Sequence[Descriptor]) -> bytes:
    """Return what comes before a pickled message in its frame."""
    return _COUNT.pack(len(descriptors)) + b"".join(_DESCRIPTOR.pack(*one) for one in descriptors)


def unpack_message(body: bytes) -> tuple[list[Descriptor], bytes]:
    """Return the descriptors of a message, and the message, still pickled."""
    (count,) = _COUNT.unpack_from(body)
    end = _COUNT.size + count * _DESCRIPTOR.size
    found = [Descriptor(*one) for one in _DESCRIPTOR.iter_unpack(body[_COUNT.size : end])]
    return found, body[end:]


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
