"""Split what a rank prints into whole lines.

Pieces of bytes arrive that end anywhere. A line is passed on when it is complete, so that lines of several ranks never
mix. What has no newline is passed on when its rank ends or when it has become very long. If there is just one rank,
everything is passed on at once. Of a line that redraws itself by carriage returns (a progress bar), only the last
drawing is passed on.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from typing import TYPE_CHECKING, get_args

from nb_accelerate.base.records.kept import take
from nb_accelerate.notebook.protocol.output import Chunk, Decoder, StreamName

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_LINES = 1000  # last lines of a rank that are kept
_MAX_WIDTH = 1 << 13  # characters of each kept line, counted from its end
_TAIL_LINES = 20  # lines that an error shows
_MAX_UNFINISHED = 1 << 20  # characters without a newline that are held back; more are passed on as a line


# Gloo of PyTorch 2.8 to 2.10 prints this to standard output for each group, in C++ and past every log level.
_OF_GLOO = re.compile(
    r"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1\n"
)


class RankOutput:
    """Takes the bytes that one rank prints, passes them on as lines, and keeps the last ones.

    Args:
        mark: mark of its frames, see `notebook.protocol.output`.

    Attributes:
        alone: whether this is the only rank, so that nothing is held back until its newline.
        logged: ids of the runs that the rank has logged values of, in their order. The values are None.
    """

    def __init__(
        self,
        mark: bytes,
        emit: Callable[[StreamName, str], object] = lambda *_: None,
        *,
        alone: bool = False,
        on_display: Callable[[], object] = lambda: None,
    ) -> None:
        self.emit = emit
        self.on_display = on_display
        self._decoder = Decoder(mark)
        self.logged: dict[str, None] = {}
        self.alone = alone
        decoder = codecs.getincrementaldecoder("utf-8")
        self._line: dict[StreamName, _Line] = {name: _Line() for name in get_args(StreamName)}
        self._text = {name: decoder("replace") for name in self._line}
        self._last: deque[str] = deque(maxlen=_MAX_LINES)
        self._num_newlines = 0

    @property
    def text(self) -> str:
        """The last thousand lines, of all streams."""
        return "".join((*self._last, *(line.text[-_MAX_WIDTH:] for line in self._line.values())))

    @property
    def tail(self) -> str:
        """The last lines since `forget`, as many as an error shows."""
        text = self.text
        num_lines = self._num_newlines + (text != "" and not text.endswith("\n"))
        return "".join(text.splitlines(keepends=True)[-min(_TAIL_LINES, num_lines) :]) if num_lines else ""

    def forget(self) -> None:
        """Begin another cell: an error in it shows none of the lines before."""
        self._num_newlines = 0

    def feed(self, data: bytes) -> None:
        """Take bytes that the rank has written to descriptor 1, with its frames."""
        for chunk in self._decoder.feed(data):
            self._pass_on(chunk)

    def feed_stderr(self, data: bytes) -> None:
        """Take bytes that C code has written to descriptor 2."""
        self._pass_on(Chunk("stderr", data))

    def finish(self) -> None:
        """Pass on what has no newline yet."""
        for stream, line in self._line.items():
            text = line.take()
            if text:
                self._emit(stream, text if self.alone else text + "\n")

    def _pass_on(self, chunk: Chunk) -> None:
        if chunk.stream == "record":
            run = take(chunk.data)
            if run is not None:
                self.logged[run] = None
            return
        if chunk.stream == "display":
            self.finish()
            self.on_display()
            return
        line = self._line[chunk.stream]
        text = self._text[chunk.stream].decode(chunk.data)
        if self.alone and chunk.stream != "note":
            text = line.take() + text
        else:
            whole, newline, rest = text.rpartition("\n")
            text = line.take() + whole + newline if newline else ""
            if "\r" in text:
                text = "\n".join(map(last_drawing, text.split("\n")))
            line.add(rest)
            if line.size > _MAX_UNFINISHED:
                text += line.take() + "\n"
        if "[Gloo] Rank " in text:
            text = _OF_GLOO.sub("", text)
        if text:
            self._emit(chunk.stream, text)

    def _emit(self, stream: StreamName, text: str) -> None:
        self._num_newlines += text.count("\n")
        self._last.extend(line[-_MAX_WIDTH:] for line in text.splitlines(keepends=True)[-_MAX_LINES:])
        self.emit(stream, text)


class _Line:
    """Holds what was printed since the last newline. Pieces are joined when they are needed, not one by one."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.size = 0

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, piece: str) -> None:
        if "\r" in piece:
            piece = last_drawing(self.take() + piece)
        if piece:
            self._pieces.append(piece)
            self.size += len(piece)

    def take(self) -> str:
        """Return all of it, and become empty."""
        text = self.text
        self._pieces, self.size = [], 0
        return text


def last_drawing(line: str) -> str:
    """Return a line without what was drawn over: its last drawing that shows something, and not the returns before."""
    shown = line.rstrip("\r\t ")
    rest = line[len(shown) :]
    return shown[shown.rfind("\r") + 1 :] + ("\r" if "\r" in rest else rest)
