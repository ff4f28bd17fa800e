"""Print the progress of a notebook as lines of text. In a terminal the panel of its ranks stands below."""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING

from nb_accelerate.notebook.display.drawing.block import Block, can_redraw

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

_INDENT = "      "


class CellProgress:
    """Print number and title of each cell, its output, indented, and its seconds.

    Args:
        out: where to. If it is a terminal, what `panel` is told stays at the bottom while the cell runs.

    Attributes:
        is_live: it is such a terminal.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._fresh_line = True
        self._block = Block(out) if can_redraw(out) else None
        self._panels: dict[str, Sequence[str]] = {}
        self._where = ""
        self.is_live = self._block is not None

    @contextlib.contextmanager
    def cell(self, number: int, total: int, title: str) -> Iterator[None]:
        """Print the title of a cell, run the block, and print its seconds."""
        self.line(f"[{number}/{total}] {title}")
        self._where = f"cell {number} of {total}"
        began = time.monotonic()
        try:
            yield
        finally:
            # A launch that continues in the background, or whose kernel has died, sends no more lines.
            self._panels.clear()
            self._draw()
            self._end_line()
            self.line(f"{_INDENT}{time.monotonic() - began:.1f} s")

    def line(self, text: str) -> None:
        """Write a line that is not output of a cell."""
        self._write(f"{text}\n")

    def text(self, text: str) -> None:
        """Write a piece of the output of the cell, which may end in the middle of a line."""
        self._write("".join(self._indented(text)))

    def lines(self, text: str) -> None:
        """Write some lines of what the cell shows."""
        self._end_line()
        self.text(f"{text}\n")

    def panel(self, name: str, lines: Sequence[str]) -> None:
        """Replace the lines last shown under this name; an empty list removes them."""
        if lines:
            self._panels[name] = lines
        else:
            self._panels.pop(name, None)
        self._draw()

    def _draw(self) -> None:
        if self._block is not None:
            lines = [line for panel in self._panels.values() for line in panel]
            self._block.draw_lines([f"{self._where} · {lines[0]}", *lines[1:]] if lines else [])

    def _end_line(self) -> None:
        if not self._fresh_line:
            self.text("\n")

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._block is not None:
            self._block.hide()
        self._out.write(text)
        self._out.flush()
        if self._block is not None and text.endswith("\n"):
            self._block.show()

    def _indented(self, text: str) -> Iterator[str]:
        for part in re.split(r"(\r?\n|\r)", text):
            if part.endswith("\n"):
                yield "\n"
                self._fresh_line = True
            elif part == "\r":
                # A terminal writes over the line; a log has no such thing and gets the next one.
                yield "\r" if self._out.isatty() else "" if self._fresh_line else "\n"
                self._fresh_line = True
            elif part:
                yield f"{_INDENT}{part}" if self._fresh_line else part
                self._fresh_line = False
