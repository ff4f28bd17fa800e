"""What the kernel and the host of a machine tell each other: frames, over one stream of bytes in each direction.

::

    kind (1 byte) | rank (4, signed; -1: the machine) | length (8) | body | tag of a seal, if the stream has one

A host writes `MAGIC` before its first frame. What comes before that is what a login script has printed.
"""

from __future__ import annotations

import enum
import json
import os
import struct
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from nb_accelerate.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Comes before the first frame of a host. The number is the version of what follows.
MAGIC = b"\n--nb-accelerate-host 1--\n"

MACHINE = -1  # in the place of a rank: the frame is about the whole machine

MAX_BODY = 1 << 30  # Bytes of a body, at most. More means that what is read are no frames.

_MAX_PREAMBLE = 1 << 12  # bytes before `MAGIC` that are kept, at most: the last ones

# Bytes that are read at once of what may be many frames. The rest of a longer one is read to its place.
_READ = 1 << 16

_LONG_READ = 1 << 20  # Bytes of a long frame that are read at once, at most. Other machines get their turn then.

_HEADER = struct.Struct("!BiQ")

BEAT = struct.Struct("!d")
NUMBER = struct.Struct("!Q")

Bytes: TypeAlias = bytes | bytearray | memoryview  # a piece of what is sent, which is not copied


class LinkError(LaunchError):
    """The bytes from the stream of a machine are no frames, or not the frames that were sent."""


class Kind(enum.IntEnum):
    """What a frame is about. Those to the host say what to do, those from it what has happened."""

    HELLO = 1  # from the host, first: what this machine is, as JSON
    BEAT = 2  # both ways, every second: the `time.monotonic` of who sends it, as `BEAT`
    QUIT = 3  # to the host: end all ranks and yourself
    ASK = 4  # to the host: a question, as JSON: its ``number``, the name ``what`` is asked, and the arguments
    ANSWER = 5  # from the host: the answer, as JSON, with the ``number`` of the question
    START = 6  # To the host: start a rank, as JSON. The number in place of the rank is its handle's, used once.
    PID = 7  # to the host: the process id of a rank, which it has told the kernel, as `NUMBER`
    SIGNAL = 8  # to the host: a signal for a rank, as `NUMBER`
    POKE = 9  # to the host: bytes for the socket over which a rank is asked for its stack or line
    # Both ways: a pickled message, passed on untouched, behind its descriptors: see `notebook.remote.sender`.
    MESSAGE = 10
    HAND_ON = 11  # from the host: what a rank has printed before the messages that have come, has come too
    SEGMENT = 12  # Both ways: `NUMBER` of a segment, and the next piece of its content. Then comes a message with it.
    DROP = 13  # Both ways: `NUMBER` of a segment that no other message comes with.
    STDOUT = 14  # from the host: what a rank has written to its stdout
    STDERR = 15  # from the host: what C code of a rank has written to its stderr
    STACKS = 16  # from the host: what a rank has written about its stack
    PAGE = 17  # both ways: changed pieces of the progress page of a rank; see `notebook.remote.mirror`
    # From the host: a rank has ended, as JSON: its ``exitcode`` or null, and why that is not known (``lost``). It is
    # the last frame about this rank.
    END = 18
    FACTS = 19  # From the host: what is known about the process of a rank, as JSON. To it: look now.


# In the place of a descriptor, and of the number of its segment: the socket on which the host was told to listen, and
# nothing, since what was to come with the message was taken back.
LISTENER, EMPTY = -2, -3

_COUNT = struct.Struct("!B")
_NUMBER = struct.Struct("!q")


def pack_message(numbers: Sequence[int]) -> bytes:
    """Return what comes before a pickled message in its frame: the segments with the contents of its descriptors."""
    return _COUNT.pack(len(numbers)) + b"".join(map(_NUMBER.pack, numbers))


def unpack_message(body: Bytes) -> tuple[list[int], bytes]:
    """Return the numbers of a message's segments, and the message, still pickled."""
    (count,) = _COUNT.unpack_from(body)
    end = _COUNT.size + count * _NUMBER.size
    return [number for (number,) in _NUMBER.iter_unpack(body[_COUNT.size : end])], bytes(body[end:])


class Frame(NamedTuple):
    """A frame that has come."""

    kind: int
    rank: int
    body: bytes


class Seal(Protocol):
    """A keyed checksum of what goes in one direction of a stream, which also counts."""

    size: int  # bytes of a tag

    def tag(self, data: Sequence[Bytes]) -> bytes:
        """Return the tag of the next frame that is sent."""

    def check(self, data: Sequence[Bytes], tag: bytes) -> None:
        """Check the tag of the next frame that has come. LinkError: it is not the tag of this frame at this place."""


class FrameWriter:
    """Makes the bytes of frames of one direction, in the order in which they are sent."""

    def __init__(self, seal: Seal | None = None) -> None:
        self._seal = seal

    def frame(self, kind: int, rank: int, *parts: Bytes) -> list[Bytes]:
        """Return the pieces of a frame, whose body is the parts one after the other; nothing large is copied."""
        pieces = [_HEADER.pack(kind, rank, sum(memoryview(part).nbytes for part in parts)), *parts]
        return pieces if self._seal is None else [*pieces, self._seal.tag(pieces)]


class FrameParser:
    """Finds frames in the bytes of one direction, however these are cut.

    Args:
        has_preamble: `MAGIC` comes before the first frame, as from a host.
    """

    def __init__(self, seal: Seal | None = None, *, has_preamble: bool = False) -> None:
        self.preamble = b""  # the last bytes before `MAGIC`
        self.is_open = not has_preamble  # whether `MAGIC` has come
        self.heard = 0  # bytes that have been received
        self._seal = seal
        self._data = bytearray()
        self._missing = memoryview(b"")  # the part of `_data` that is still to come, of a long frame

    def receive(self, fd: int) -> int:
        """Read once from a descriptor that does not block, and return how many bytes have come; 0 at its end.

        Raises:
            BlockingIOError: there is nothing yet.
        """
        if self._missing:
            size = self._filled(os.readv(fd, [self._missing[:_LONG_READ]]))
        else:
            data = os.read(fd, _READ)
            self.feed(data)
            size = len(data)
        self.heard += size
        return size

    def feed(self, data: Bytes) -> None:
        rest = memoryview(data)
        size = min(len(rest), len(self._missing))
        if size:
            self._missing[:size] = rest[:size]
            self._filled(size)
        self._data += rest[size:]
        if not self.is_open:
            self._find_magic()

    def _filled(self, size: int) -> int:
        # An empty view of `_data` would keep it from being changed too.
        self._missing = self._missing[size:] if size < len(self._missing) else memoryview(b"")
        return size

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames that are complete. LinkError: these are no frames, or others than were sent."""
        while self.is_open and not self._missing and len(self._data) >= _HEADER.size:
            kind, rank, length = _HEADER.unpack_from(self._data)
            if length > MAX_BODY:
                raise LinkError(
                    f"what came is not what a host writes (a frame of {length} bytes): something else writes to stdout"
                )
            end = _HEADER.size + length + (0 if self._seal is None else self._seal.size)
            if len(self._data) < end:
                if end > _READ:  # the rest of it is not read at once, but to its place
                    came = len(self._data)
                    self._data += bytes(end - came)
                    self._missing = memoryview(self._data)[came:]
                return
            yield Frame(kind, rank, self._taken(_HEADER.size + length, end))

    def _taken(self, end_of_body: int, end: int) -> bytes:
        with memoryview(self._data) as data:
            body = bytes(data[_HEADER.size : end_of_body])
            if self._seal is not None:
                self._seal.check((data[: _HEADER.size], body), bytes(data[end_of_body:end]))
        del self._data[:end]
        return body

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


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()
