"""Make log files for output that is too long for a cell, in a folder that only this user can read.

The name of the folder can be guessed, so another user may have put a folder or a link there. It is used only if it is
this user's own folder; otherwise a new one is made.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
import uuid
from pathlib import Path
from typing import IO

_PREFIX = "nb_accelerate-logs-"

_MAX_AGE = 7 * 24 * 3600.0
"""Seconds from the last write to a log until it is removed."""


def new_log() -> tuple[Path, IO[str]]:
    """Open a new log file, and remove old ones.

    Returns:
        Its path, and the file.

    Raises:
        OSError: it cannot be made.
    """
    folder, descriptor = _own_folder()
    try:
        _remove_old(descriptor)
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(name, flags, 0o600, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    return folder / name, os.fdopen(file, "w", encoding="utf-8", errors="backslashreplace")


def _own_folder() -> tuple[Path, int]:
    """Return the path of the folder, and a descriptor of it."""
    base = Path(tempfile.gettempdir())
    usual = base / f"{_PREFIX}{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        usual.mkdir(mode=0o700)
    others = base.glob(f"{usual.name}-*")  # made when the usual one was not ours
    for folder in (usual, *others):
        with contextlib.suppress(OSError):
            return folder, _open_own(folder)
    made = Path(tempfile.mkdtemp(prefix=f"{usual.name}-"))
    return made, _open_own(made)


def _open_own(folder: Path) -> int:
    """Return a descriptor of a folder, after making sure that nobody else can read or write it.

    Raises:
        OSError: it is a link, no folder, or another user's.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
        if stat.S_IMODE(found.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_old(folder: int) -> None:
    oldest = time.time() - _MAX_AGE
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".log"):
                with contextlib.suppress(OSError):  # somebody else has just removed it
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.name, dir_fd=folder)
