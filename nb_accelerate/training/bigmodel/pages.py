"""Pages of mapped files: whether they are in memory, and bringing them there."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys

_WILLNEED = 3
_POPULATE_READ = 22  # Linux 5.14
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def around(begin: int, end: int) -> tuple[int, int]:
    """Return begin and end of the whole pages around a range of addresses."""
    return begin // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


def are_present(begin: int, end: int) -> bool:
    """Return whether all pages of a mapped range are in memory. False where the system does not tell."""
    if _LIBC is None:
        return False
    flags = (ctypes.c_ubyte * ((end - begin) // mmap.PAGESIZE))()
    if _LIBC.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), flags):
        return False
    return all(flag & 1 for flag in bytes(flags))


def make_present(begin: int, end: int) -> bool:
    """Bring all pages of a mapped range into memory, without the GIL. False where the system cannot.

    Raises:
        OSError: the disk fails, or the file has become shorter than its map.
    """
    if _LIBC is None:
        return False
    at, length = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
    # The first asks the disk for everything, however little the system reads ahead, and the second waits for it.
    if not _LIBC.madvise(at, length, _WILLNEED) and not _LIBC.madvise(at, length, _POPULATE_READ):
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS):  # an older kernel
        return False
    raise OSError(error, os.strerror(error))
