"""The panel in a terminal: some lines at the bottom, redrawn in place while what is printed scrolls by above."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import IO, TYPE_CHECKING, TextIO

from typing_extensions import override

from nb_accelerate.notebook.display.drawing import text
from nb_accelerate.notebook.display.panel import Drawing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.view import View

_MOST_LINES = 20


def write(stream: IO[str] | None, text: str) -> None:
    """Write as well as can be: with escapes for letters that the stream has not; nothing where nothing can be."""
    # Raises nothing: a stream may be the user's own class, and output is no reason to end what watches over ranks.
    if stream is None:
        return
    with contextlib.suppress(Exception):
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def flush(stream: IO[str] | None) -> None:
    """Flush as well as can be."""
    if stream is not None:
        with contextlib.suppress(Exception):
            stream.flush()


def can_redraw(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Block(Drawing):
    """Lines at the bottom of a terminal. Code that prints there calls `hide` before and `show` after.

    What was printed last may be an unfinished line: then `show` is called after the rest of it, and nothing is drawn
    until then.
    """

    every = 0.25

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: list[str] = []
        self._height = 0
        self._is_hidden = False

    @override
    def draw(self, view: View) -> None:
        size = shutil.get_terminal_size()
        color = text.can_color(self._stream)
        self._put(text.lines(view, size.columns - 1, color=color, bars=True), size.lines)

    def draw_lines(self, lines: Sequence[str]) -> None:
        """Replace the lines by these, as many as there is room for."""
        size = shutil.get_terminal_size()
        # A line that wraps would be two, and redrawing would leave one of them behind.
        self._put([line[: size.columns - 1] for line in lines], size.lines)

    def _put(self, lines: Sequence[str], height: int) -> None:
        fitting = list(lines[: min(_MOST_LINES, height - 1)])
        if fitting != self._lines:
            self._wipe()
            self._lines = fitting
            self._paint()

    @override
    def finish(self, view: View, *, was_drawn: bool) -> None:
        self._wipe()
        self._lines = []
        if view.is_worth_keeping:
            end_of_line = "\n" if self._is_hidden else ""
            size = shutil.get_terminal_size()
            lines = text.lines(view, size.columns - 1, color=text.can_color(self._stream))
            write(self._stream, end_of_line + "\n".join(lines) + "\n")
        flush(self._stream)

    def hide(self) -> None:
        """Erase the lines, so that something can be printed in their place."""
        self._is_hidden = True
        self._wipe()

    def show(self) -> None:
        """Draw the lines again, below what was printed."""
        self._is_hidden = False
        self._paint()

    def _wipe(self) -> None:
        if self._height:
            write(self._stream, f"\x1b[{self._height}F\x1b[J")
            self._height = 0

    def _paint(self) -> None:
        if self._lines and not self._is_hidden:
            write(self._stream, "\n".join(self._lines) + "\n")
            self._height = len(self._lines)
        flush(self._stream)
