"""Send frames in a thread of its own: who has something to send is not held up, and a beat goes out each second."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.notebook.protocol.anonymous_file import anonymous_file
from nb_accelerate.notebook.remote.frames import (
    BEAT,
    EMPTY,
    MACHINE,
    NUMBER,
    FrameWriter,
    Kind,
    pack_message,
    unpack_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.notebook.remote.frames import Bytes, FrameParser, Seal


BEAT_INTERVAL = 1.0  # seconds between two beats

SILENCE_LIMIT = 15.0  # seconds without a frame, after the first one, after which the other end is lost

_PIECE = 1 << 20  # Bytes of a segment in one frame. What is urgent waits for no more than that.

# Bytes of frames that are written together, about: each write of its own takes longer than copying them.
_JOINED = 1 << 16

_MOST_PIECES = 16  # pieces that are written as they are; more of them, which are small then, are copied into one
_CLOSE_TIMEOUT = 2.0  # seconds in which `close` waits for what is still to be sent


class Silence:
    """Counts beats in which nothing was heard of the other end, from when its first frame has come.

    What nobody has read yet was heard: then this process is the slow one.
    """

    def __init__(self, parser: FrameParser, fd: int) -> None:
        self._parser = parser
        self._heard = self._beats = 0
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def count_beat(self) -> bool:
        """Count a beat, and return whether there were too many."""
        before, self._heard = self._heard, self._parser.heard if self._parser.is_open else 0
        self._beats = self._beats + 1 if 0 < before == self._heard and not self._poll.poll(0) else 0
        return self._beats * BEAT_INTERVAL >= SILENCE_LIMIT


class _Queued(NamedTuple):
    kind: int
    rank: int
    parts: tuple[Bytes, ...]
    file: int = -1  # its content is to be sent, in pieces
    offset: int = 0  # of the next piece
    size: int = 0  # of the file, or of so much of it as is to be sent


class FrameSender:
    """Sends frames in the order in which they are given, urgent ones first.

    Args:
        fd: where to; it stays the caller's.
        on_beat: called each second, in the thread, also while nothing can be written. Returns whether to send a beat.
        on_failure: takes the error after which nothing can be sent any more.

    Attributes:
        waiting: bytes that wait to be sent, files not counted.
    """

    def __init__(
        self,
        fd: int,
        seal: Seal | None,
        *,
        preamble: bytes = b"",
        on_beat: Callable[[], bool],
        on_failure: Callable[[str, BaseException], object],
    ) -> None:
        os.set_blocking(fd, False)
        # Room for a whole piece, where the system allows that: by default a pipe has that for 64 kB.
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # it is a socket, or this user has many large pipes
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIECE)
        self._fd = fd
        self._writer = FrameWriter(seal)
        self._preamble = preamble
        self._on_beat = on_beat
        self._wake = threading.Condition()
        self._urgent: deque[_Queued] = deque()
        self._queue: deque[_Queued] = deque()
        self._is_closed = self._is_dropped = False
        self._beat_due = time.monotonic() + BEAT_INTERVAL
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self.waiting = self._in_all = 0
        self._thread = HelperThread(self._run, name="frames", on_failure=on_failure)

    def start(self) -> None:
        self._thread.start()

    def send(self, kind: Kind, rank: int, *parts: Bytes, urgent: bool = False) -> None:
        """Have a frame sent. The parts must not change any more."""
        self._put(_Queued(kind, rank, parts), urgent=urgent)

    def send_segment(self, number: int, fd: int) -> None:
        """Have the content of a file sent. The descriptor is taken over."""
        size = os.fstat(fd).st_size
        with self._wake:
            self._in_all = size + (self._in_all if any(one.file >= 0 for one in self._queue) else 0)
            self._put(_Queued(Kind.SEGMENT, MACHINE, (NUMBER.pack(number),), fd, size=size))

    def unsent(self) -> tuple[int, int]:
        """Return the bytes that wait to be sent, with those of files, and those of all files since none has waited."""
        with self._wake:
            return self.waiting + sum(one.size - one.offset for one in self._queue if one.file >= 0), self._in_all

    def take_back(self, rank: int) -> list[int]:
        """Send no more of the segments that come with messages to one rank only, and empty ones with the messages.

        Returns:
            The numbers of the segments that the other end does not get, or not all of.
        """
        with self._wake:
            waiting = {NUMBER.unpack(one.parts[0])[0] for one in self._queue if one.file >= 0}
            wanted, back = set(), []
            for index, one in enumerate(self._queue):
                if one.kind == Kind.MESSAGE:
                    numbers, _ = unpack_message(one.parts[0])
                    if one.rank == rank:
                        numbers = [EMPTY if number in waiting else number for number in numbers]
                        self._queue[index] = one._replace(parts=(pack_message(numbers), *one.parts[1:]))
                    wanted.update(numbers)
            for index, one in enumerate(self._queue):
                if one.file >= 0 and (number := NUMBER.unpack(one.parts[0])[0]) not in wanted:
                    self._queue[index] = one._replace(size=one.offset)  # at its end: the thread closes it
                    back.append(number)
            return back

    def close(self, *, drop: bool = False) -> None:
        """Send what waits, unless that is to be dropped, and end the thread."""
        with self._wake:
            self._is_closed, self._is_dropped = True, drop
            self._wake.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT)
            # No more is sent; a write that has begun is waited for once more.
            self._is_dropped = True
            self._thread.join(_CLOSE_TIMEOUT)
        for queued in self._queue:
            if queued.file >= 0:
                os.close(queued.file)
        self._queue.clear()

    def _put(self, queued: _Queued, *, urgent: bool = False) -> None:
        with self._wake:
            if self._is_closed and queued.file >= 0:
                os.close(queued.file)
            if self._is_closed:
                return
            self.waiting += sum(map(len, queued.parts))
            (self._urgent if urgent else self._queue).append(queued)
            self._wake.notify()

    # The thread.

    def _run(self) -> None:
        self._write([self._preamble])
        while (queued := self._next()) is not None:
            data, size = [*self._bytes_of(queued)], 0
            while size < _JOINED and (self._urgent or self._queue):  # this thread alone takes from them
                more = self._take_joined()
                if more is None:
                    break
                data += self._bytes_of(more)
                size = sum(map(len, data))
            self._write(data)

    def _next(self) -> _Queued | None:
        """Wait for the next frame, which may be a beat. None: there will be none."""
        with self._wake:
            while not self._is_dropped:
                now = time.monotonic()
                if now >= self._beat_due:
                    self._beat_due = max(self._beat_due + BEAT_INTERVAL, now)  # late on a busy machine, but never later
                    if self._on_beat():
                        return _Queued(Kind.BEAT, MACHINE, (BEAT.pack(now),))
                if self._urgent or self._queue:
                    queued = self._pop(self._urgent or self._queue)
                    if queued.file >= 0 and queued.offset < queued.size:
                        # The rest of it goes in front of all that is not urgent.
                        self.waiting += len(queued.parts[0])
                        self._queue.appendleft(queued._replace(offset=min(queued.offset + _PIECE, queued.size)))
                    return queued
                if self._is_closed:
                    return None
                self._wake.wait(self._beat_due - now)
        return None

    def _take_joined(self) -> _Queued | None:
        with self._wake:
            queue = self._urgent or self._queue
            return self._pop(queue) if queue and queue[0].file < 0 else None

    def _pop(self, queue: deque[_Queued]) -> _Queued:
        queued = queue.popleft()
        self.waiting -= sum(map(len, queued.parts))
        return queued

    def _bytes_of(self, queued: _Queued) -> list[Bytes]:
        """Return a frame, of a file its next piece; of one that has been sent nothing, and close it."""
        if queued.file < 0:
            return self._writer.frame(queued.kind, queued.rank, *queued.parts)
        size = min(_PIECE, queued.size - queued.offset)
        if not size:
            os.close(queued.file)
            return []
        piece = os.pread(queued.file, size, queued.offset)  # the place of reading is shared with other copies of it
        return self._writer.frame(queued.kind, queued.rank, *queued.parts, piece)

    def _write(self, pieces: list[Bytes]) -> None:
        if len(pieces) > _MOST_PIECES:
            pieces = [b"".join(pieces)]
        unwritten = [memoryview(piece) for piece in pieces if piece]
        while unwritten and not self._is_dropped:
            try:
                written = os.writev(self._fd, unwritten)
            except BlockingIOError:
                self._await_room()
                continue
            while unwritten and written >= len(unwritten[0]):
                written -= len(unwritten.pop(0))
            if unwritten:
                unwritten[0] = unwritten[0][written:]

    def _await_room(self) -> None:
        """Wait until something can be written, or the next beat is due."""
        self._poll.poll(max(0.0, self._beat_due - time.monotonic()) * 1000)
        if time.monotonic() >= self._beat_due:  # no beat goes between two halves of a frame
            self._beat_due = time.monotonic() + BEAT_INTERVAL
            self._on_beat()


class SentSegments:
    """Sends a segment when the first message comes with it, and keeps its number for the next ones.

    A file is known by its inode. This holds a descriptor of it, so that no other file is given that number.
    """

    def __init__(self, sender: FrameSender) -> None:
        self._sender = sender
        self._numbers = itertools.count()
        self._segments: dict[tuple[int, int], tuple[int, int]] = {}  # by inode: its number, a descriptor
        self._used: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def number_of(self, fd: int) -> int:
        """Return the number of a segment, which is sent before what is sent after this call."""
        inode = os.fstat(fd)
        key = inode.st_dev, inode.st_ino
        with self._lock:
            self._used.add(key)
            if key not in self._segments:
                self._segments[key] = next(self._numbers), os.dup(fd)
                self._sender.send_segment(self._segments[key][0], os.dup(fd))
            return self._segments[key][0]

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop segments that were not sent as a whole; they are sent again with the next message."""
        with self._lock:
            for key in [key for key, (number, _) in self._segments.items() if number in numbers]:
                self._drop(key)

    def drop_unused(self) -> None:
        """Drop the segments that no message named since the last call; called at each beat."""
        with self._lock:
            for key in self._segments.keys() - self._used:
                self._drop(key)
            self._used.clear()

    def _drop(self, key: tuple[int, int]) -> None:
        number, fd = self._segments.pop(key)
        os.close(fd)
        self._sender.send(Kind.DROP, MACHINE, NUMBER.pack(number))

    def close(self) -> None:
        with self._lock:
            while self._segments:
                os.close(self._segments.popitem()[1][1])


class ReceivedSegments:
    """Files with the segments that have come, by their numbers."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def _file_of(self, number: int) -> int:
        if number not in self._files:
            self._files[number] = anonymous_file()
        return self._files[number]

    def take(self, body: bytes) -> None:
        file, unwritten = self._file_of(*NUMBER.unpack_from(body)), memoryview(body)[NUMBER.size :]
        while unwritten:
            unwritten = unwritten[os.write(file, unwritten) :]

    def get(self, number: int) -> int:
        """Return the descriptor of a segment, which stays this one's."""
        return self._file_of(number) if number == EMPTY else self._files[number]

    def drop(self, body: bytes) -> None:
        """Drop a segment, or the part of it that has come."""
        (number,) = NUMBER.unpack(body)
        if number in self._files:
            os.close(self._files.pop(number))

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
