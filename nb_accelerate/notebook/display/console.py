"""Writing to a stream that may not know every letter, or that nobody reads any more."""

from __future__ import annotations

import contextlib
from typing import IO


def write(stream: IO[str] | None, text: str) -> None:
    """Write as well as can be: with escapes for letters that the stream has not; nothing where nothing can be.

    Raises nothing: a stream may be the user's own class, and output is no reason to end what watches over ranks.
    """
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
