"""How ranks have ended: one pipe for all that are started together, to which the process that starts them writes it."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from nb_accelerate.notebook.protocol.interrupts import interrupts_later
from nb_accelerate.notebook.worker.server.server import END_REPORT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nb_accelerate.notebook.ranks.sources import Sources

_CHUNK = 1 << 16  # bytes that are read at once, at most


class EndReports:
    """The read end of the pipe. Handles of ranks `hold` it, and the thread of their loop reads it; see `end_reports`.

    Attributes:
        write_end: descriptor for the process that starts the ranks.
        exitcodes: of ranks that have ended, by key.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self.exitcodes: dict[int, int] = {}
        self._awaited: dict[int, Callable[[], object]] = {}
        self._is_over = False
        self._num_held = 0

    def hold(self) -> None:
        """Keep it open until as many `release` it."""
        self._num_held += 1

    def release(self) -> None:
        """Close it if nobody else holds it."""
        self._num_held -= 1
        self.close_unless_held()

    def close_unless_held(self) -> None:
        """Close it, once, if nobody holds it."""
        if self._num_held == 0 and self._read_end >= 0:
            os.close(self._read_end)
            self._read_end = -1

    def wait_for(self, key: int, sources: Sources, on_end: Callable[[], object]) -> None:
        """Have `on_end` called when a rank has ended, or that will never be reported: perhaps at once."""
        self._awaited[key] = on_end
        # Ranks of one start are added one after the other: the end of this one may have been read with another's.
        if self._read_end not in sources and not self._is_over:
            sources.add(self._read_end, lambda: self._read(sources))
        self._tell()

    def forget(self, key: int, sources: Sources) -> None:
        """Call nothing when that rank ends."""
        self._awaited.pop(key, None)
        if not self._awaited:
            sources.drop(self._read_end)

    def _read(self, sources: Sources) -> None:
        data = os.read(self._read_end, _CHUNK)
        self.exitcodes.update(END_REPORT.iter_unpack(data))
        if not data:  # the process that starts ranks has ended, or has no other ranks of these
            self._is_over = True
            sources.drop(self._read_end)
        self._tell()

    def _tell(self) -> None:
        for key in [key for key in self._awaited if self._is_over or key in self.exitcodes]:
            self._awaited.pop(key)()


@contextlib.contextmanager
def end_reports() -> Iterator[EndReports]:
    """Yield reports for ranks that are started in the block, and whose handles hold them beyond it."""
    ends = EndReports()
    try:
        yield ends
    finally:
        with interrupts_later():
            os.close(ends.write_end)
            ends.close_unless_held()
