"""Folders for the files of multiprocessing in ranks: one for each server, locked while the server lives.

A server that was killed cannot remove its folder. Its lock is free then, and the next server that starts takes the lock
and removes the folder. A marker file, made as soon as the lock is taken, tells it from other folders with such a name.
To remove a folder, lock it first, and look then whether it is still there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile

_PREFIX = "nb-ranks-"  # Of the name of a folder. Short, since the path of a socket may have a hundred characters.
_MARKER = ".nb_accelerate-ranks"

# Bytes of the path of the folder for temporary files, at most: multiprocessing makes sockets below it.
_MAX_BASE_LENGTH = 100 - len("/nb-ranks-12345678/123456/listener-12345678")

_SHORT_BASES = ("/tmp", "/var/tmp")  # noqa: S108 - where everybody may make a folder of their own


class Scratch:
    """Makes and removes the folders of a server's ranks."""

    def __init__(self) -> None:
        self._folder = ""
        self._lock = -1
        self._names: set[str] = set()

    def make(self, name: str) -> str:
        """Make a folder and return its path. Call `remove` also if this fails."""
        if not self._folder:
            self._folder, self._lock = _new_folder()
        path = f"{self._folder}/{name}"
        self._names.add(name)
        os.mkdir(path, mode=0o700)  # noqa: PTH102 - a process that was just forked pays for each line of pathlib
        return path

    def remove(self, name: str) -> None:
        """Remove a folder that `make` made, with all that is in it."""
        if name not in self._names:
            return
        self._names.remove(name)
        _remove(f"{self._folder}/{name}")
        if not self._names:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._folder}/{_MARKER}")  # noqa: PTH108 - pathlib is slow after a fork
            _remove(self._folder)
            self.leave()

    def leave(self) -> None:
        """Close the lock, in a process that was forked from the server: it is the server's, and ends with it."""
        if self._lock >= 0:
            os.close(self._lock)
        self._folder, self._lock = "", -1
        self._names.clear()


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)  # noqa: PTH106 - pathlib is slow after a fork
    except OSError:  # seldom: multiprocessing has put something into it
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove folders of servers of this user that were killed."""
    with contextlib.suppress(OSError), os.scandir(_base()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(OSError):  # its server lives, or somebody else has just removed it
                    lock = _lock(entry.path, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_marked(lock):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(lock)


def _base() -> str:
    """Return the folder for temporary files, or a shorter one if sockets below it would have too long a path."""
    wanted = tempfile.gettempdir()
    if len(os.fsencode(wanted)) <= _MAX_BASE_LENGTH:
        return wanted
    return next((folder for folder in _SHORT_BASES if os.access(folder, os.W_OK | os.X_OK)), wanted)


def _is_marked(folder: int) -> bool:
    try:
        marker = os.stat(_MARKER, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(marker.st_mode) and marker.st_uid == os.geteuid()


def _new_folder() -> tuple[str, int]:
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=_base())
    try:
        lock = _lock(folder, fcntl.LOCK_EX)
    except OSError:  # of a file system without locks
        return folder, -1  # without a marker, or it would be taken for an abandoned one
    os.close(os.open(_MARKER, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=lock))
    return folder, lock


def _lock(folder: str, how: int) -> int:
    """Lock a folder of this user, and return the descriptor that has the lock. OSError: it is gone, or locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "belongs to another user", folder)
        fcntl.flock(descriptor, how)
        if not os.path.samestat(found, os.stat(folder, follow_symlinks=False)):  # noqa: PTH116 - Path.stat is the same
            raise FileNotFoundError(errno.ENOENT, "another is there now", folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
