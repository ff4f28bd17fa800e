"""Wait for several descriptors and channels at once, in one thread that others can wake up."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import selectors
import termios
import threading
import time
from typing import TYPE_CHECKING

from nb_accelerate.notebook.protocol.interrupts import interrupts_later

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.protocol.channel import Channel

_CHUNK = 1 << 16  # bytes that are read at once, at most

# Seconds between two small reads of output, at least. Waking up for every line takes time from the ranks.
_MIN_READ_INTERVAL = 0.0003

_LARGE_READ = 1 << 13  # Bytes. A read of fewer is a small one: the next one may return more if it is made later.

# Seconds of a wait, at most. The operating system takes no larger numbers; a longer wait has no timeout.
_MAX_TIMEOUT = 1e6


class Sources:
    """A selector of descriptors and channels, each with an action, and with a pipe that ends a wait."""

    def __init__(self, on_ring: Callable[[], object]) -> None:
        self._selector = selectors.DefaultSelector()
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._on_ring = on_ring
        self._closed = False
        self._has_read_little = False
        self._last_small_read = 0.0
        self._lock = threading.RLock()  # a signal handler may ring while its thread does
        try:
            self._bell_read, self._bell_write = os.pipe()
        except OSError:
            self._selector.close()
            raise
        for fd in (self._bell_read, self._bell_write):
            os.set_blocking(fd, False)
        self.add(self._bell_read, self._answer_ring)

    def __contains__(self, source: Channel | int) -> bool:
        return (source if isinstance(source, int) else source.fileno()) in self._keys

    def add(self, source: Channel | int, action: Callable[[], None]) -> None:
        """Have `wait` call `action` whenever a source can be read."""
        key = self._selector.register(source, selectors.EVENT_READ, action)
        self._keys[key.fd] = key

    def drop(self, source: Channel | int) -> None:
        """Wait for a source no longer. Events that `wait` has found already are dropped too."""
        if source in self:
            del self._keys[self._selector.unregister(source).fd]

    def wait(self, seconds: float) -> None:
        """Wait until sources can be read, at most so many seconds, and call their actions."""
        for key, _ in self._selector.select(max(0.0, seconds) if seconds < _MAX_TIMEOUT else None):
            # An action before this one may have closed the source, and what was opened since may have its number.
            # Reading that would take what is meant for somebody else, or block.
            if self._keys.get(key.fd) is key:
                key.data()

    def has_read(self, size: int) -> None:
        """Note that so many bytes of what a rank prints were read at once."""
        self._has_read_little = self._has_read_little or size < _LARGE_READ

    def space_small_reads(self) -> None:
        """Wait a moment if output is read in small pieces one right after the other."""
        if not self._has_read_little:
            return
        now = time.monotonic()
        if now - self._last_small_read < _MIN_READ_INTERVAL:
            time.sleep(_MIN_READ_INTERVAL)
        self._last_small_read, self._has_read_little = now, False

    def num_waiting(self, fd: int) -> int:
        """Return how many bytes can be read from a pipe now; 0 for one that was dropped."""
        if fd not in self:
            return 0
        number = array.array("i", [0])
        fcntl.ioctl(fd, termios.FIONREAD, number)
        return number[0]

    def read(self, fd: int) -> bytes:
        """Return what can be read now, at most `_CHUNK` bytes; at the end of the stream, drop it and return b""."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return b""
        except ConnectionResetError:  # the other end of a socket has left something unread
            data = b""
        if not data:
            self.drop(fd)
        return data

    def ring(self) -> None:
        """Wake up the thread that waits. For any thread, also in a signal handler."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self._bell_write, b"!")

    def close(self) -> None:
        """Close the selector and the pipe. Descriptors that were added stay open: they are their owners'."""
        with interrupts_later():
            with self._lock:  # a later `ring`, of a button say, must not write to what has this number then
                self._closed = True
                os.close(self._bell_write)
            self._selector.close()
            os.close(self._bell_read)

    def _answer_ring(self) -> None:
        try:
            os.read(self._bell_read, 4096)
        except BlockingIOError:  # an event of the same round has answered it
            return
        self._on_ring()
