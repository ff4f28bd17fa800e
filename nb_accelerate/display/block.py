"""The panel in a terminal: some lines at the bottom, redrawn in place while what is printed scrolls by above."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, TextIO

from typing_extensions import override

from nb_accelerate.display import text
from nb_accelerate.display.panel import Drawing

if TYPE_CHECKING:
    from nb_accelerate.display.view import View

_MOST_LINES = 20


def can_redraw(stream: TextIO) -> bool:
    """Is it a terminal that moves its cursor when told to?"""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Block(Drawing):
    """Lines at the bottom of a terminal. Whoever prints there calls `hide` before and `show` after.

    Args:
        stream: the terminal.
    """

    every = 0.25

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: list[str] = []
        self._height = 0

    @override
    def draw(self, view: View) -> None:
        size = shutil.get_terminal_size()
        lines = text.table(view, bars=True).split("\n")[: min(_MOST_LINES, size.lines - 1)]
        # A line that wraps would be two, and redrawing would leave one of them behind.
        lines = [line[: size.columns - 1] for line in lines]
        if lines != self._lines:
            self.hide()
            self._lines = lines
            self.show()

    @override
    def finish(self, view: View, *, was_drawn: bool) -> None:
        self.hide()
        self._lines = []
        if view.is_worth_keeping:
            self._stream.write(f"{text.table(view)}\n")
        self._stream.flush()

    def hide(self) -> None:
        """Wipe it, so that something can be printed where it was."""
        if self._height:
            self._stream.write(f"\x1b[{self._height}F\x1b[J")
            self._height = 0

    def show(self) -> None:
        """Draw it again."""
        if self._lines:
            self._stream.write("\n".join(self._lines) + "\n")
            self._stream.flush()
            self._height = len(self._lines)
