"""A notebook's run as lines of text, for a terminal and for a log. In a terminal, with the panel of its ranks below."""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING

from nb_accelerate.display.block import Block, can_redraw

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

_INDENT = "      "


class CellProgress:
    """Each cell's number and title when it starts, what it prints, indented, and its seconds when it ends.

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
        """Surround a running cell with its title and its seconds."""
        self.line(f"[{number}/{total}] {title}")
        self._where = f"cell {number} of {total}"
        began = time.monotonic()
        try:
            yield
        finally:
            # Of a launch that goes on nothing more is heard; nor of one whose kernel has died.
            self._panels.clear()
            self._draw()
            self._end_line()
            self.line(f"{_INDENT}{time.monotonic() - began:.1f} s")

    def line(self, text: str) -> None:
        """Write a line of our own."""
        self._write(f"{text}\n")

    def text(self, text: str) -> None:
        """Write a piece of what the cell printed; it may end anywhere."""
        self._write("".join(self._indented(text)))

    def lines(self, text: str) -> None:
        """Write some lines of what the cell shows."""
        self._end_line()
        self.text(f"{text}\n")

    def panel(self, name: str, lines: Sequence[str]) -> None:
        """Show lines in place of those that were last shown under this name; none ends it."""
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
