"""Pages of mapped files: whether they are in memory, and bringing them there."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
import time

_WILLNEED = 3
_POPULATE_READ = 22  # Linux 5.14
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

_ASKED_AGAIN = 0.1
"""Seconds after which the system is asked again. It takes longer to answer than all else that precedes a block."""


class MajorFaults:
    """How often this process has had to wait for a page of a file."""

    def __init__(self) -> None:
        self._number = 0
        self._asked = -math.inf  # seconds

    @property
    def number(self) -> int:
        """The number, at most a tenth of a second old. 0 where the system does not tell."""
        now = time.monotonic()
        if now >= self._asked + _ASKED_AGAIN:
            self._asked, self._number = now, _major_faults()
        return self._number


def _major_faults() -> int:
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


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
