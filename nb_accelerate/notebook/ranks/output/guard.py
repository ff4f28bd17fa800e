"""Keep errors in showing output away from what runs the ranks."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from nb_accelerate.notebook.ranks.output.sinks import Sink

logger = logging.getLogger(__name__)

_RETRY_INTERVAL = 0.5  # seconds until output that could not be shown is tried again
_MAX_TEXT = 300  # characters of an error's text that are shown


class OutputGuard:
    """A context manager that swallows errors in showing output: ``with guard: sink.write(...)``.

    A full disk, a terminal that cannot write a letter, or a mistake in a display must not end a training. The cell gets
    one line about the first error; each is logged with its traceback.
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
        self.retry_at = time.monotonic() + _RETRY_INTERVAL
        logger.info("Output of ranks could not be shown.", exc_info=error)
        if not self._has_told:
            self._has_told = True
            text = short_text(error)
            self._tell(f"some output is missing here because it could not be shown ({text}). The ranks go on")
        return True

    def _tell(self, line: str) -> None:
        """Show a line as text or, if that fails, as a display: a cell takes those also after its last line."""
        if self._sink is None:
            return
        try:
            self._sink.write("stderr", line + "\n")
        except Exception:
            try:
                self._sink.display("display_data", {"data": {"text/plain": line}, "metadata": {}, "transient": {}})
            except Exception:
                logger.warning(line)


def short_text(error: Exception) -> str:
    """Return the type of an error and the beginning of its text, in ASCII, which any terminal can show."""
    try:
        text = " ".join(str(error).split())[:_MAX_TEXT]
    except Exception:  # its __str__ fails too
        text = ""
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line.encode("ascii", "backslashreplace").decode()
