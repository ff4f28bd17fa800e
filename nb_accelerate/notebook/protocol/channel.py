"""Send and receive messages and file descriptors over a private Unix socket pair.

A frame is a header (length, number of descriptors, whether the message is in a file) and a pickled message. Both ends
belong to one user's process family and neither has a name, so no stranger can write to one: that is why unpickling here
is safe.

A large message travels as a descriptor of an anonymous file: a sender to a suspended process is not blocked.

The kernel reads without blocking (`Channel.drain`), because a rank that was stopped in the middle of a frame must
not stop the kernel. A rank reads one message at a time (`Channel.recv`).
"""

from __future__ import annotations

import array
import contextlib
import io
import os
import pickle
import socket
import struct
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from nb_accelerate.notebook.protocol.shipping import write_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_HEADER = struct.Struct("!QB?")
_MAX_FDS = 17  # descriptors in one message, at most: 16 of the sender's, and a file with the message
_LONGEST_INLINE = 1 << 15  # bytes of a pickled message in a frame, at most

# Frames that fit into the buffer of a socket, at least. It has 200 kB on Linux and 8 kB on macOS.
_FRAMES_IN_BUFFER = 4

_CHUNK = 1 << 16  # bytes that are read at once

# Plain numbers, because flags of an enumeration take a tenth of the time of a read.
_AT_ONCE = int(socket.MSG_DONTWAIT)
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))

# A read ends before descriptors too, not only after them: so do BSD's, and macOS's.
_ENDS_BEFORE_FDS = sys.platform != "linux"


class Received(NamedTuple):
    """A message and the descriptors that came with it. The receiver owns them."""

    message: Any
    fds: tuple[int, ...]


def as_bytes(message: object) -> bytes:
    """Return what `Channel.send` writes for a small message, for a socket that is written by other means."""
    body = pickle.dumps(message, protocol=5)
    return _HEADER.pack(len(body), 0, False) + body


class Channel:
    """One end of a connection. `send` may be called from several threads, reading belongs to one.

    Attributes:
        loads: makes a message of its pickle. `bytes` leaves it pickled, for who passes it on with `send_pickled`.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)  # not what users' code has set by `socket.setdefaulttimeout`, here or at the other end
        self._socket = sock
        # A frame that fits into the buffer several times does not keep its sender waiting while the other end is
        # suspended.
        buffer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self._longest_inline = min(_LONGEST_INLINE, buffer // _FRAMES_IN_BUFFER - _HEADER.size)
        self._sending = threading.Lock()
        self._bytes = bytearray()
        self._fds: deque[int] = deque()
        self._ended = False
        self.loads: Callable[[bytes], Any] = pickle.loads

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return a channel to keep, and the socket to give to the process at the other end."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(here), there

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Return a channel over a descriptor that was received or inherited; it is taken over."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send a message, with copies of `fds`. Blocks while the other end has several messages to read.

        Raises:
            OSError: the other end is gone, or there is no room for a large message.
        """
        self.send_pickled(pickle.dumps(message, protocol=5), fds)

    def send_pickled(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message that is pickled already, as `send` does."""
        with contextlib.ExitStack() as stack:
            in_file = len(body) > self._longest_inline
            if in_file:
                file = stack.enter_context(write_segment([memoryview(body)]))
                fds = [file.fileno(), *fds]
            frame = _HEADER.pack(len(body), len(fds), in_file) + (b"" if in_file else body)
            # As a whole, or frames of two threads would mix. Descriptors go with the first bytes, however few the
            # socket takes of the frame; the rest follows without them.
            with self._sending:
                sent = 0
                if fds:
                    sent = socket.send_fds(self._socket, [frame], list(fds))
                self._socket.sendall(memoryview(frame)[sent:])

    def recv(self) -> Received:
        """Wait for the next message. Raises EOFError if the other end was closed."""
        while True:
            for received in self._parse():
                return received
            if not self._read(0):
                raise EOFError("the other end of the channel was closed")

    def drain(self) -> tuple[list[Received], bool]:
        """Return everything that has arrived, without waiting, and False once the end of the stream was read."""
        size, num_fds = _CHUNK, 0
        while size == _CHUNK or len(self._fds) > num_fds or (size and _ENDS_BEFORE_FDS):  # more may be there
            num_fds = len(self._fds)
            size = self._read(_AT_ONCE)
        return list(self._parse()), not self._ended

    def close(self) -> None:
        """Close this end, and descriptors that nobody took."""
        for fd in self._fds:
            socket.close(fd)
        self._fds.clear()
        self._socket.close()

    def _read(self, flags: int) -> int:
        """Read one chunk, and return its size: 0 at the end, or if nothing is there and `flags` forbid to wait."""
        if self._ended:
            return 0
        try:
            data, fds = _recv_fds(self._socket, flags)
        except BlockingIOError:
            return 0
        # The other end was killed before it had read everything: for this one that is the end of the stream.
        except ConnectionError:
            data, fds = b"", ()
        self._fds.extend(fds)
        self._bytes += data
        self._ended = not data
        return len(data)

    def _parse(self) -> Iterator[Received]:
        while len(self._bytes) >= _HEADER.size:
            length, num_fds, in_file = _HEADER.unpack_from(self._bytes)
            end = _HEADER.size + (0 if in_file else length)
            if len(self._bytes) < end:
                return
            body = bytes(memoryview(self._bytes)[_HEADER.size : end])
            del self._bytes[:end]
            # They are there: the system hands descriptors over with the first byte that they were sent with.
            fds = tuple(self._fds.popleft() for _ in range(num_fds))
            if in_file:
                file, *rest = fds
                fds = tuple(rest)
                with io.FileIO(file) as source:
                    body = source.readall()
            yield Received(self.loads(body), fds)


def _recv_fds(sock: socket.socket, flags: int) -> tuple[bytes, Sequence[int]]:
    # socket.recv_fds does not set close-on-exec, and a descriptor that leaks into a subprocess of the user's hides
    # the end of a stream from us. macOS cannot set it in the same call.
    fds = array.array("i")
    space = socket.CMSG_SPACE(_MAX_FDS * fds.itemsize)
    data, ancillary, _, _ = sock.recvmsg(_CHUNK, space, flags | _CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    for fd in fds if not _CLOEXEC else ():
        os.set_inheritable(fd, False)
    return data, fds
