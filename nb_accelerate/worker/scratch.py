"""Where multiprocessing in ranks puts its files: one folder per server, there while it has ranks, locked as it lives.

A server that was killed cannot tidy up. Its lock is free then, and the next server that starts takes it and removes the
folder. Whoever wants a folder, to use or to remove it, locks it first and looks afterwards whether it is still there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile

_PREFIX = "nb-ranks-"
"""Short, since the path of a socket has room for a hundred characters."""

_WITHOUT_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EBADF, errno.EINVAL)
"""What a file system says that cannot lock a folder. Nobody can take its folders for abandoned ones then."""


class Scratch:
    """The folders of a server's ranks."""

    def __init__(self) -> None:
        self._folder = ""
        self._lock = -1
        self._names: set[str] = set()

    def make(self, name: str) -> str:
        """A new folder; its path. `remove` it also if this fails."""
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
            _remove(self._folder)
            self.leave()

    def leave(self) -> None:
        """In a process that was forked from the server: the lock is the server's alone, and ends with it."""
        if self._lock >= 0:
            os.close(self._lock)
        self._folder, self._lock = "", -1
        self._names.clear()


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)  # noqa: PTH106 - as above
    except OSError:  # seldom: multiprocessing has put something into it
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove what servers of this user have left behind that were killed."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(OSError):  # its server lives, or somebody else has just removed it
                    lock = _lock(entry.path, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(lock)


def _new_folder() -> tuple[str, int]:
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            return folder, _lock(folder, fcntl.LOCK_EX)
        except FileNotFoundError:  # somebody took it for an abandoned one before it was locked
            continue
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            return folder, -1


def _lock(folder: str, how: int) -> int:
    """The descriptor that has the lock of a folder of this user.

    Raises:
        FileNotFoundError: it is gone.
        OSError: it is locked, or cannot be.
    """
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
