"""Folders for the files of multiprocessing in ranks: those of a server are in one, which is there while it has ranks.

The kernel chooses the path, and removes the folder of a server that was killed, which cannot do so itself.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile

_PREFIX = "nb-ranks-"
"""Of the name of a folder. Short, since the path of a socket may have a hundred characters."""

_MAX_BASE_LENGTH = 100 - len("/nb-ranks-12345678/123456/listener-12345678")
"""Bytes of the path of the folder for temporary files, at most: multiprocessing makes sockets below it."""

_SHORT_BASES = ("/tmp", "/var/tmp")  # noqa: S108 - where everybody may make a folder of their own


def new_path() -> str:
    """Return a path for the folder of a server: in that for temporary files, or in a shorter one if sockets need it."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > _MAX_BASE_LENGTH:
        base = next((folder for folder in _SHORT_BASES if os.access(folder, os.W_OK | os.X_OK)), base)
    return f"{base}/{_PREFIX}{secrets.token_hex(4)}"


class Scratch:
    """Makes and removes the folders of a server's ranks, in the folder with this path."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._names: set[str] = set()

    def make(self, name: str) -> str:
        """Make a folder and return its path. Call `remove` also if this fails."""
        if not self._names:
            os.mkdir(self._folder, mode=0o700)  # noqa: PTH102 - a process that was just forked pays for pathlib
        self._names.add(name)
        path = f"{self._folder}/{name}"
        os.mkdir(path, mode=0o700)  # noqa: PTH102 - as above
        return path

    def remove(self, name: str) -> None:
        """Remove a folder that `make` made, with all that is in it."""
        if name in self._names:
            self._names.remove(name)
            _remove(f"{self._folder}/{name}")
            if not self._names:
                _remove(self._folder)


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)  # noqa: PTH106 - pathlib is slow after a fork
    except OSError:  # seldom: multiprocessing has put something into it
        shutil.rmtree(folder, ignore_errors=True)
