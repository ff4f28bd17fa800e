"""What ranks print, as whole lines.

Bytes arrive in lumps that end anywhere, from several ranks at once. A line is passed on when it is complete, so
that lines of different ranks never mix; what is left without a newline is passed on when its rank ends, when it
has become very long, or at once if there is just one rank. Of a line of several ranks' that redraws itself (a progress
bar), only the last drawing is passed on.
"""

from __future__ import annotations

import codecs
from collections import deque
from typing import TYPE_CHECKING

from nb_accelerate.display.runs import take
from nb_accelerate.protocol.output import Chunk, Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.protocol.output import StreamName

_KEPT_LINES = 1000
"""Last lines of a rank that are kept."""

_KEPT_WIDTH = 1 << 13
"""Characters of each that are kept, from its end."""

_TAIL_LINES = 20
"""Lines that an error shows."""

_LONGEST_LINE = 1 << 20
"""Characters of a line without an end, after which it is passed on in pieces."""


class RankOutput:
    """The output of one rank.

    Args:
        mark: mark of its frames.
        emit: takes a stream's name and one or more whole lines.
        alone: there is just this rank, so nothing can mix and nothing is held back.
        on_display: called where the rank has marked the place of a display.

    Attributes:
        logged: ids of runs that it has logged values of, in order.
    """

    def __init__(
        self,
        mark: bytes,
        emit: Callable[[StreamName, str], None],
        *,
        alone: bool,
        on_display: Callable[[], None] | None = None,
    ) -> None:
        self._decoder = Decoder(mark)
        self._emit_lines = emit
        self._on_display = on_display
        self.logged: dict[str, None] = {}
        self.alone = alone
        decoder = codecs.getincrementaldecoder("utf-8")
        self._text = {name: decoder("replace") for name in ("stdout", "stderr")}
        self._line: dict[StreamName, _Line] = {"stdout": _Line(), "stderr": _Line()}
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def text(self) -> str:
        """The last thousand lines, of both streams."""
        return "".join((*self._last, *(line.text[-_KEPT_WIDTH:] for line in self._line.values())))

    @property
    def tail(self) -> str:
        """The last few lines, for an error that wants to show them."""
        return "".join(self.text.splitlines(keepends=True)[-_TAIL_LINES:])

    def feed(self, data: bytes) -> None:
        """Take bytes of the rank's main pipe."""
        for chunk in self._decoder.feed(data):
            self._pass_on(chunk)

    def feed_stderr(self, data: bytes) -> None:
        """Take bytes that C code wrote to descriptor 2."""
        self._pass_on(Chunk("stderr", data))

    def finish(self) -> None:
        """Pass on what is left: nothing more will come soon."""
        for stream, line in self._line.items():
            text = line.take()
            if text:
                self._emit(stream, text if self.alone else text + "\n")

    def unfinished(self, stream: StreamName) -> str:
        """What was printed to a stream after its last newline: a prompt, or a progress bar that is being redrawn."""
        return self._line[stream].text

    def _pass_on(self, chunk: Chunk) -> None:
        if chunk.stream == "record":
            run = take(chunk.data)
            if run is not None:
                self.logged[run] = None
            return
        if chunk.stream == "display":
            if self._on_display is not None:
                self.finish()
                self._on_display()
            return
        line = self._line[chunk.stream]
        text = self._text[chunk.stream].decode(chunk.data)
        if self.alone:
            text = line.take() + text
        else:
            whole, newline, rest = text.rpartition("\n")
            text = _last_drawings(line.take() + whole + newline) if newline else ""
            line.add(rest)
            if line.size > _LONGEST_LINE:
                text += line.take() + "\n"
        if text:
            self._emit(chunk.stream, text)

    def _emit(self, stream: StreamName, text: str) -> None:
        self._last.extend(line[-_KEPT_WIDTH:] for line in text.splitlines(keepends=True)[-_KEPT_LINES:])
        self._emit_lines(stream, text)


class _Line:
    """What was printed since the last newline, in pieces: a long line is not copied for each."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.size = 0

    @property
    def text(self) -> str:
        """The pieces as one."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, piece: str) -> None:
        """Add a piece."""
        if "\r" in piece:
            piece = last_drawing(self.take() + piece)
        if piece:
            self._pieces.append(piece)
            self.size += len(piece)

    def take(self) -> str:
        """Give all of it, and be empty."""
        text = self.text
        self._pieces, self.size = [], 0
        return text


def _last_drawings(lines: str) -> str:
    """Whole lines, without what has been drawn over in each."""
    return "\n".join(map(last_drawing, lines.split("\n"))) if "\r" in lines else lines


def last_drawing(line: str) -> str:
    """A line without what was drawn over: the last drawing that shows something, behind a carriage return."""
    shown = line.rstrip("\r\t ")
    start = shown.rfind("\r")
    if start < 0:
        return line
    return shown[start:] + ("\r" if "\r" in line[len(shown) :] else line[len(shown) :])


def prefixed(text: str, prefix: str) -> str:
    """`text`, which is whole lines, with `prefix` in front of each line."""
    if not prefix:
        return text
    *whole, rest = text.split("\n")  # not splitlines(), which also ends a line at a carriage return
    return "".join(f"{prefix}{line}\n" for line in whole) + (prefix + rest if rest else "")
