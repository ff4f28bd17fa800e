"""The memory of a progress page, in the process that reads it."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import layout
from nb_accelerate.base.progress_page.commands import CommandWriter
from nb_accelerate.base.progress_page.sample import read

if TYPE_CHECKING:
    from nb_accelerate.base.progress_page.sample import Sample


class PageReader:
    """The memory of a progress page, for reading. `close` it.

    It takes over the descriptor of an empty file, of which the process that writes gets a copy. A file without a name
    is gone with the last process that holds it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        os.ftruncate(fd, layout.SIZE)
        self._memory = mmap.mmap(fd, layout.SIZE)

    def read(self) -> Sample:
        """Return what the page says now."""
        return read(self._memory)

    @property
    def request(self) -> int:
        """Return the number of the call or cell, see `base.progress_page.sample.Sample`."""
        number: int = layout.WORD.unpack_from(self._memory, 8 * layout.REQUEST)[0]
        return number

    def want_rows(self, wanted: bool) -> None:
        """Ask for progress bars in a panel, or as text; see `base.progress_page.ProgressPage.wants_rows`."""
        layout.WORD.pack_into(self._memory, 8 * layout.ROWS_WANTED, wanted)

    @property
    def commands(self) -> CommandWriter:
        """Commands to the training loop of the rank."""
        return CommandWriter(self._memory)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
        os.close(self.fd)
