"""A notebook's run as lines of text, for a terminal and for a log."""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

_INDENT = "      "


class CellProgress:
    """Each cell's number and title when it starts, what it prints, indented, and its seconds when it ends."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._fresh_line = True

    @contextlib.contextmanager
    def cell(self, number: int, total: int, title: str) -> Iterator[None]:
        """Surround a running cell with its title and its seconds."""
        self.line(f"[{number}/{total}] {title}")
        began = time.monotonic()
        try:
            yield
        finally:
            if not self._fresh_line:
                self.text("\n")
            self.line(f"{_INDENT}{time.monotonic() - began:.1f} s")

    def line(self, text: str) -> None:
        """Write a line of our own."""
        print(text, file=self._out, flush=True)

    def text(self, text: str) -> None:
        """Write a piece of what the cell printed; it may end anywhere."""
        for part in re.split(r"(\r?\n|\r)", text):
            if part.endswith("\n"):
                self._out.write("\n")
                self._fresh_line = True
            elif part == "\r":
                # A terminal writes over the line; a log has no such thing and gets the next one.
                self._out.write("\r" if self._out.isatty() else "" if self._fresh_line else "\n")
                self._fresh_line = True
            elif part:
                self._out.write(f"{_INDENT}{part}" if self._fresh_line else part)
                self._fresh_line = False
        self._out.flush()
