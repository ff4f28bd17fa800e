"""The memory of a progress page, in the process that reads it."""

from __future__ import annotations

import mmap
import os
import sys
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import layout
from nb_accelerate.base.progress_page.sample import read

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nb_accelerate.base.progress_page.sample import Sample


class PageReader:
    """The memory of a progress page, for reading. `close` it.

    It takes over the descriptor of an empty file, which is for the process that writes, see `detach`. A file without a
    name is gone with the last process that holds it. Without a file the memory is this process's own.
    """

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd
        if fd < 0:
            self._memory = mmap.mmap(-1, layout.SIZE)
            return
        os.ftruncate(fd, layout.SIZE)
        if sys.version_info >= (3, 13):
            self._memory = mmap.mmap(fd, layout.SIZE, trackfd=False)
        else:  # keeps a copy of the descriptor
            self._memory = mmap.mmap(fd, layout.SIZE)

    def detach(self) -> int:
        """Return the descriptor, which the caller closes. The memory stays."""
        fd, self.fd = self.fd, -1
        return fd

    def read(self) -> Sample:
        """Return what the page says now."""
        return read(self._memory)

    @property
    def request(self) -> int:
        """Return the number of the call or cell, see `base.progress_page.sample.Sample`."""
        number: int = layout.WORD.unpack_from(self._memory, 8 * layout.REQUEST)[0]
        return number

    def copy(self) -> bytes:
        """Return what is on the page now."""
        return self._memory[:]

    def write(self, pieces: Iterable[tuple[int, bytes]]) -> None:
        """Write bytes, each at its place, in this order."""
        for at, data in pieces:
            self._memory[at : at + len(data)] = data

    def want_rows(self, wanted: bool) -> None:
        """Ask for progress bars in a panel, or as text; see `base.progress_page.ProgressPage.wants_rows`."""
        word, place = layout.WORD.pack(wanted), 8 * layout.ROWS_WANTED
        if self._memory[place : place + len(word)] != word:  # a page of another machine is not sent it for each cell
            self.write([(place, word)])

    def interrupt(self, number: int, count: int) -> None:
        """Say which call or cell SIGINT is meant for; `count` is another one each time."""
        word = number * layout.INTERRUPTS + count % layout.INTERRUPTS
        self.write([(8 * layout.INTERRUPT, layout.WORD.pack(word))])

    def save(self, number: int) -> None:
        """Ask for a checkpoint, with a number that no other one has had."""
        self.write([(8 * layout.SAVE, layout.WORD.pack(number))])

    def stop(self) -> None:
        """Have training end after this epoch."""
        self.write([(8 * layout.STOP, layout.WORD.pack(1))])

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
        if self.fd >= 0:
            os.close(self.detach())
