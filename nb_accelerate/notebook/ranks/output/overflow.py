"""Keep output that is too long for a cell: all of it in a log file, its last lines and a count in a display."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import uuid
from collections import deque
from pathlib import Path
from typing import IO, Any

from nb_accelerate.notebook.ranks.output.rank_output import last_drawing

_TAIL_LINES = 20
"""Last lines that are shown."""

_TAIL_WIDTH = 1000
"""Characters of each that are shown, from its end."""

_PREFIX = "nb_accelerate-"

_MAX_AGE = 7 * 24 * 3600.0
"""Seconds from the last write to a log until it is removed."""

_REDRAW_INTERVAL = 0.5
"""Seconds between two drawings of the tail."""


class Overflow:
    """Writes the output of a cell to a log, and draws its last lines; where no log can be written, it says so."""

    def __init__(self) -> None:
        self.due = time.monotonic() + _REDRAW_INTERVAL
        self.has_news = False
        self._id = uuid.uuid4().hex
        self._lines = 0
        self._size = 0
        self._tail: deque[str] = deque([""], maxlen=_TAIL_LINES + 1)
        """The last lines. The last of them is not finished: what is written next continues it."""
        self._path: Path | None = None
        self._file: IO[str] | None = None
        self._problem = ""
        try:
            self._path, self._file = new_log()
        except OSError as error:
            self._problem = f"no log can be written ({error})"

    def write(self, text: str) -> None:
        """Write text to the log, and keep its last lines."""
        self.has_news = True
        self._lines += text.count("\n")
        self._size += len(text)
        begun = self._tail.pop() if self._tail else ""
        for line in (begun + text).split("\n")[-_TAIL_LINES - 1 :]:
            shown = last_drawing(line)
            self._tail.append(shown if len(shown) <= _TAIL_WIDTH else "... " + shown[-_TAIL_WIDTH:])
        if self._file is not None:
            try:
                self._file.write(text)
            except OSError as error:
                self._give_up(error)

    def drawing(self, lines: int, size: int) -> dict[str, Any]:
        """Return the content of the Jupyter message that shows it. The cell shows so many lines or characters."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)
        self.has_news = False
        self.due = time.monotonic() + _REDRAW_INTERVAL
        if self._lines > lines:
            head = f"... {self._lines - lines:,} more lines; " + self._place_of_log(f"all {self._lines:,} are")
        else:
            head = f"... {self._size - size:,} more characters; " + self._place_of_log(f"all {self._size:,} are")
        tail = "\n".join(list(self._tail)[-_TAIL_LINES - (not self._tail[-1]) :])
        return {
            "data": {"text/plain": f"{head}. The last ones:\n{tail}".rstrip("\n")},
            "metadata": {},
            "transient": {"display_id": self._id},
        }

    def close(self) -> None:
        """Close the log."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _place_of_log(self, all_are: str) -> str:
        if self._problem:
            return self._problem
        return f"{all_are} in {self._path}"

    def _give_up(self, error: OSError) -> None:
        """Stop writing the log, because the disk is full for example. What was written stays."""
        self._problem = f"the log {self._path} ends where it could not be written any more ({error.strerror})"
        self.close()
        self._file = None


def new_log() -> tuple[Path, IO[str]]:
    """Open a new log file, remove old ones of this user, and return its path and the file. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=time.strftime(f"{_PREFIX}%Y%m%d-%H%M%S-"), suffix=".log")
    _remove_old()
    return Path(name), os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace")


def _remove_old() -> None:
    oldest = time.time() - _MAX_AGE
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*.log"):
        with contextlib.suppress(OSError):  # somebody else has just removed it
            found = path.lstat()
            if found.st_uid == os.geteuid() and found.st_mtime < oldest:
                path.unlink()
