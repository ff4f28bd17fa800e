"""Keeps errors in showing what ranks print away from what runs the ranks."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from nb_accelerate.ranks.sinks import Sink

logger = logging.getLogger(__name__)

_RETRY = 0.5
"""Seconds. What is due and fails stays due: without a pause it would be tried again without end."""

_LONGEST = 300
"""Characters of an error's text."""


class OutputGuard:
    """A context manager in which errors end nothing: ``with guard: sink.write(...)``.

    A full disk, a terminal that cannot write a letter, or a mistake in a display then cost output, and no training.
    The first error is told in the cell, in one line; each is logged with its traceback.

    Args:
        sink: where to tell; None only logs.

    Attributes:
        retry_at: `time.monotonic` before which what was due should not be tried again.
    """

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink
        self._has_told = False
        self.retry_at = 0.0

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.retry_at = time.monotonic() + _RETRY
        logger.info("Output of ranks could not be shown.", exc_info=error)
        if not self._has_told:
            self._has_told = True
            self._tell(_line(error))
        return True

    def _tell(self, line: str) -> None:
        """Through whatever still works: a cell takes displays also where there is no room for more lines."""
        if self._sink is None:
            return
        try:
            self._sink.write("stderr", line + "\n")
        except Exception:
            try:
                self._sink.display("display_data", {"data": {"text/plain": line}, "metadata": {}, "transient": {}})
            except Exception:
                logger.warning(line)


def _line(error: Exception) -> str:
    try:
        said = " ".join(str(error).split())[:_LONGEST]
    except Exception:  # an exception whose text cannot be made either
        said = ""
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    line = f"some output is missing here, since it could not be shown ({text}). What prints it goes on"
    return line.encode("ascii", "backslashreplace").decode()
