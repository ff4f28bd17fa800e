"""Swap two folders in one step, which Python has no function for."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> bool:
    """Give two folders each other's name, so that nobody ever sees either name missing.

    Returns:
        Whether it was done. Linux can on most local file systems; elsewhere nothing has changed.
    """
    # Absent from C libraries older than glibc 2.28, and from other systems than Linux.
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    return done == 0
