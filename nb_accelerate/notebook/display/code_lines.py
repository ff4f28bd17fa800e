"""The lines of the user's code that a rank was seen at lately, and the one to show."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import PurePath
from typing import TYPE_CHECKING

from nb_accelerate.errors.traceback_lines import line_in_cell

if TYPE_CHECKING:
    from nb_accelerate.base.progress_page import CodeLine, Phase
    from nb_accelerate.notebook.protocol.messages import Frame

_KEPT = 10
"""Lines. The most frequent one is shown: what changes each time is no news, but flicker."""


class CodeLines:
    """The recent lines of a rank."""

    def __init__(self) -> None:
        self._recent: deque[CodeLine] = deque(maxlen=_KEPT)

    def add(self, line: CodeLine | None) -> None:
        """Add what a sample says; the same one counts once."""
        if line is None:  # of a call or cell that has just begun
            self._recent.clear()
        elif not self._recent or line.number != self._recent[-1].number:
            self._recent.append(line)

    def at(self, phase: Phase) -> CodeLine | None:
        """Return the line that it was at most often in a phase, the newest one of equals; None if in none."""
        seen = [line for line in reversed(self._recent) if line.phase == phase]
        counted = Counter((line.filename, line.lineno, line.called) for line in seen)
        if not counted:
            return None
        most = counted.most_common(1)[0][0]
        return next(line for line in seen if (line.filename, line.lineno, line.called) == most)


def short_location(line: CodeLine | Frame) -> str:
    """Return where a line is, short enough for a column: ``cell 4 line 6``, ``train.py:12``."""
    return line_in_cell(line.filename, line.lineno) or f"{PurePath(line.filename).name}:{line.lineno}"
