"""Segments: the contents of descriptors that come with messages, each sent once over a stream."""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING

from nb_accelerate.notebook.protocol.anonymous_file import anonymous_file
from nb_accelerate.notebook.remote.frames import EMPTY, MACHINE, NUMBER, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.remote.sender import FrameSender


class SentSegments:
    """Sends a segment when the first message comes with it, and keeps its number for the next ones.

    A file is known by its inode. This holds a descriptor of it, so that no other file is given that number.
    """

    def __init__(self, sender: FrameSender) -> None:
        self._sender = sender
        self._numbers = itertools.count()
        self._kept: dict[tuple[int, int], tuple[int, int]] = {}  # by inode: its number, a descriptor
        self._used: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def number_of(self, fd: int) -> int:
        """Return the number of a segment, which is sent before what is sent after this call."""
        inode = os.fstat(fd)
        key = inode.st_dev, inode.st_ino
        with self._lock:
            self._used.add(key)
            if key not in self._kept:
                self._kept[key] = next(self._numbers), os.dup(fd)
                self._sender.send_segment(self._kept[key][0], os.dup(fd))
            return self._kept[key][0]

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop segments that were not sent as a whole; they are sent again with the next message."""
        with self._lock:
            for key in [key for key, (number, _) in self._kept.items() if number in numbers]:
                self._drop(key)

    def drop_unused(self) -> None:
        """Drop the segments that no message named since the last call; called at each beat."""
        with self._lock:
            for key in self._kept.keys() - self._used:
                self._drop(key)
            self._used.clear()

    def _drop(self, key: tuple[int, int]) -> None:
        number, fd = self._kept.pop(key)
        os.close(fd)
        self._sender.send(Kind.DROP, MACHINE, NUMBER.pack(number))

    def close(self) -> None:
        """Close all descriptors."""
        with self._lock:
            while self._kept:
                os.close(self._kept.popitem()[1][1])


class ReceivedSegments:
    """Files with the segments that have come, by their numbers."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def _file_of(self, number: int) -> int:
        if number not in self._files:
            self._files[number] = anonymous_file()
        return self._files[number]

    def take(self, body: bytes) -> None:
        """Take a piece of a segment."""
        file, rest = self._file_of(*NUMBER.unpack_from(body)), memoryview(body)[NUMBER.size :]
        while rest:
            rest = rest[os.write(file, rest) :]

    def get(self, number: int) -> int:
        """Return the descriptor of a segment, which stays this one's."""
        return self._file_of(number) if number == EMPTY else self._files[number]

    def drop(self, body: bytes) -> None:
        """Drop a segment, of which perhaps nothing has come."""
        (number,) = NUMBER.unpack(body)
        if number in self._files:
            os.close(self._files.pop(number))

    def close(self) -> None:
        """Close all files."""
        while self._files:
            os.close(self._files.popitem()[1])
