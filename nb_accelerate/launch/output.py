"""What ranks print, as whole lines in the cell.

Bytes arrive in lumps that end anywhere, from several ranks at once. A line is passed on when it is complete, so
that lines of different ranks never mix; what is left without a newline is passed on when its rank ends, or at
once if there is just one rank.
"""

from __future__ import annotations

import codecs
import sys
from collections import deque
from typing import TYPE_CHECKING

from nb_accelerate.protocol.output import Chunk, Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.protocol.output import StreamName

    Sink = Callable[[StreamName, str], None]

_KEPT_LINES = 20


class RankOutput:
    """The output of one rank."""

    def __init__(self, mark: bytes, sink: Sink, *, alone: bool) -> None:
        self._decoder = Decoder(mark)
        self._sink = sink
        self._alone = alone
        decoder = codecs.getincrementaldecoder("utf-8")
        self._text = {name: decoder("replace") for name in ("stdout", "stderr")}
        self._line: dict[StreamName, str] = {"stdout": "", "stderr": ""}
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def tail(self) -> str:
        """The last lines of both streams, for an error that wants to show them."""
        return "".join((*self._last, *self._line.values()))

    def feed(self, data: bytes) -> None:
        """Bytes of the rank's main pipe."""
        for chunk in self._decoder.feed(data):
            self._pass_on(chunk)

    def feed_stderr(self, data: bytes) -> None:
        """Bytes that C code wrote to descriptor 2."""
        self._pass_on(Chunk("stderr", data))

    def finish(self) -> None:
        """The rank has ended: what is left is all there will be."""
        for stream, line in self._line.items():
            if line:
                self._emit(stream, line if self._alone else line + "\n")
            self._line[stream] = ""

    def _pass_on(self, chunk: Chunk) -> None:
        text = self._line[chunk.stream] + self._text[chunk.stream].decode(chunk.data)
        end = len(text) if self._alone else text.rfind("\n") + 1
        self._line[chunk.stream] = text[end:]
        if end:
            self._emit(chunk.stream, text[:end])

    def _emit(self, stream: StreamName, text: str) -> None:
        self._last.extend(text.splitlines(keepends=True)[-_KEPT_LINES:])
        self._sink(stream, text)


def write_here(stream: StreamName, text: str) -> None:
    """A sink: the streams of this process, which in a kernel are those of the running cell."""
    print(text, end="", file=sys.stdout if stream == "stdout" else sys.stderr)
