"""Make log files for output that is too long for a cell, which only this user can read."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import IO

_PREFIX = "nb_accelerate-"

_MAX_AGE = 7 * 24 * 3600.0
"""Seconds from the last write to a log until it is removed."""


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
