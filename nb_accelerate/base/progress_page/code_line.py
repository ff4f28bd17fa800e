"""`CodeLine`: the line of the user's code that a rank was at, and how it lies on a progress page."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page.activity import Activity, collective_of, phase_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FILENAME = 248
_CALLED = 64
_INSIDE = 64
_LAYOUT = struct.Struct(f"=qqqqqq{_FILENAME}s{_CALLED}s{_INSIDE}sq")
SIZE = _LAYOUT.size
"""Bytes."""


@dataclass(frozen=True, kw_only=True)
class CodeLine:
    """A line of the user's code, see `notebook.worker.stack_writer`."""

    number: int  # counts samples of the line, from 1
    activity: Activity  # at the same moment
    entered: int = 0  # when the phase began: see `Sample.entered`
    filename: str  # the end of one that is very long
    lineno: int
    called: str = ""  # the function for communication that the line has called, as it stands there
    inside: str = ""  # what the line runs: ``importing pandas``, or the function that it has called

    def write(self, memory: memoryview, at: int) -> None:
        """Write it to a progress page, from byte ``at`` on."""
        filename = self.filename.encode(errors="replace")[-_FILENAME + 1 :]
        called = self.called.encode(errors="replace")[: _CALLED - 1]
        inside = self.inside.encode(errors="replace")[: _INSIDE - 1]
        activity = self.activity
        waits_in = -1 if activity.waits_in is None else activity.waits_in
        loop = activity.in_loop + 2 * activity.evaluates
        words = (self.number, self.entered, activity.phase, waits_in, loop, self.lineno)
        _LAYOUT.pack_into(memory, at, *words, filename, called, inside, self.number)

    @classmethod
    def read(cls, memory: Buffer, at: int) -> CodeLine | None:
        """Read what `write` wrote; None if nothing was, or while it is being written."""
        *words, filename, called, inside, number_behind = _LAYOUT.unpack_from(memory, at)
        number, entered, phase, waits_in, loop, lineno = words
        if number <= 0 or number != number_behind or lineno <= 0:
            return None
        return cls(
            number=number,
            activity=Activity(phase_of(phase), collective_of(waits_in), bool(loop & 1), bool(loop & 2)),
            entered=entered,
            filename=text_of(filename),
            lineno=lineno,
            called=text_of(called),
            inside=text_of(inside),
        )


def text_of(raw: bytes) -> str:
    """Return the text of some bytes of a progress page, which a zero ends. A letter that was cut is dropped."""
    return raw.split(b"\0", 1)[0].decode(errors="ignore")
