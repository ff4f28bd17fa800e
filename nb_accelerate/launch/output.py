"""What ranks print, as whole lines.

Bytes arrive in lumps that end anywhere, from several ranks at once. A line is passed on when it is complete, so
that lines of different ranks never mix; what is left without a newline is passed on when its rank ends, or at
once if there is just one rank.
"""

from __future__ import annotations

import codecs
import string
from collections import deque
from typing import TYPE_CHECKING

from nb_accelerate.display.runs import take
from nb_accelerate.protocol.output import Chunk, Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.protocol.output import StreamName

_KEPT_LINES = 1000
_TAIL_LINES = 20


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
        self._line: dict[StreamName, str] = {"stdout": "", "stderr": ""}
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def text(self) -> str:
        """The last thousand lines, of both streams."""
        return "".join((*self._last, *self._line.values()))

    @property
    def tail(self) -> str:
        """The last few lines, for an error that wants to show them."""
        return "".join(self.text.splitlines(keepends=True)[-_TAIL_LINES:])

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
                self._emit(stream, line if self.alone else line + "\n")
            self._line[stream] = ""

    def unfinished(self, stream: StreamName) -> str:
        """What was printed after the last newline: a prompt, or a progress bar that is being redrawn."""
        return self._line[stream]

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
        text = self._line[chunk.stream] + self._text[chunk.stream].decode(chunk.data)
        end = len(text) if self.alone else text.rfind("\n") + 1
        self._line[chunk.stream] = text[end:]
        if end:
            self._emit(chunk.stream, text[:end])

    def _emit(self, stream: StreamName, text: str) -> None:
        self._last.extend(text.splitlines(keepends=True)[-_KEPT_LINES:])
        self._emit_lines(stream, text)


def prefixed(text: str, template: str | None, *, rank: int, local_rank: int) -> str:
    """`text` with torchrun's line prefix in front of each line.

    Args:
        text: whole lines.
        template: may use ``${rank}``, ``${local_rank}`` and ``${role_name}``; None is no prefix.
        rank: of whoever printed it.
        local_rank: likewise.
    """
    if not template:
        return text
    prefix = string.Template(template).substitute(rank=rank, local_rank=local_rank, role_name="default")
    return "".join(prefix + line for line in text.splitlines(keepends=True))
