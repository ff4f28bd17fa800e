"""Descriptors and channels that one thread waits for, all at once."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import selectors
import termios
import threading
from typing import TYPE_CHECKING

from nb_accelerate.protocol.interrupts import interrupts_later

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.protocol.channel import Channel

_CHUNK = 1 << 16
"""Bytes that are read at once."""

_LONGEST_WAIT = 1e6
"""Seconds. Waits that are longer have no end: the operating system takes no such numbers."""


class Sources:
    """Descriptors and channels, each with what is done when something has come; and a bell for other threads.

    Args:
        on_bell: takes the bytes that were rung since the last time.
    """

    def __init__(self, on_bell: Callable[[bytes], None]) -> None:
        self._selector = selectors.DefaultSelector()
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._on_bell = on_bell
        self._closed = False
        self._lock = threading.RLock()  # a signal handler may ring while this thread does
        try:
            self._bell_read, self._bell_write = os.pipe()
        except OSError:
            self._selector.close()
            raise
        for fd in (self._bell_read, self._bell_write):
            os.set_blocking(fd, False)
        self.add(self._bell_read, self._answer_bell)

    def __contains__(self, source: Channel | int) -> bool:
        return source in self._selector.get_map()

    def add(self, source: Channel | int, action: Callable[[], None]) -> None:
        """Call ``action`` in `wait` whenever there is something to read."""
        key = self._selector.register(source, selectors.EVENT_READ, action)
        self._keys[key.fd] = key

    def drop(self, source: Channel | int) -> None:
        """Stop waiting for it. Events of the same round that are still on their way are dropped too."""
        if source in self:
            del self._keys[self._selector.unregister(source).fd]

    def wait(self, seconds: float) -> None:
        """Wait until something has come, or some seconds have passed, and do what is to be done."""
        for key, _ in self._selector.select(max(0.0, seconds) if seconds < _LONGEST_WAIT else None):
            # Something before it in this round may have closed it, and what was opened since have its number: reading
            # that would take what is meant for somebody else, or wait for ever.
            if self._keys.get(key.fd) is key:
                key.data()

    def num_waiting(self, fd: int) -> int:
        """Return how many bytes can be read from a pipe now; 0 for one that was dropped."""
        if fd not in self:
            return 0
        number = array.array("i", [0])
        fcntl.ioctl(fd, termios.FIONREAD, number)
        return number[0]

    def read(self, fd: int) -> bytes:
        """Return what is there; at the end of the stream, drop it."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return b""
        if not data:
            self.drop(fd)
        return data

    def ring(self, what: bytes) -> None:
        """Wake up the thread that waits. From any thread, also in a signal handler."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self._bell_write, what)

    def close(self) -> None:
        """Close the selector and the bell. Descriptors that were added are their owners'."""
        with interrupts_later():
            with self._lock:  # who rings later, a button say, must not write to what has this number then
                self._closed = True
                os.close(self._bell_write)
            self._selector.close()
            os.close(self._bell_read)

    def _answer_bell(self) -> None:
        try:
            rung = os.read(self._bell_read, 4096)
        except BlockingIOError:  # an event of the same round has answered it
            return
        self._on_bell(rung)
