"""Turn errors about too many files, processes or threads into sentences that say what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from typing import TYPE_CHECKING

from nb_accelerate.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES_OF_A_RANK = 15
"""Descriptors that the kernel has open for each rank, at most."""


def limits() -> tuple[tuple[int, int], ...]:
    """Return the limits of this process on open files and processes, each as (soft, hard)."""
    return tuple(map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)))


@contextlib.contextmanager
def enough_room() -> Iterator[None]:
    """Turn an error inside the block that says that a limit was reached into one that says what to do.

    Raises:
        StartError: a limit was reached.
    """
    try:
        yield
    except OSError as error:
        reason = why_no_room(error)
        if not reason:
            raise
        raise StartError(f"ranks cannot be started: {reason}") from error
    except RuntimeError as error:  # Python's threads, and torch's store
        text = str(error)
        if "can't start new thread" in text or os.strerror(errno.EAGAIN) in text:
            reason = _no_process("thread")
        elif os.strerror(errno.EMFILE) in text:
            reason = _no_file()
        else:
            raise
        raise StartError(f"ranks cannot be started: {reason}") from error


def why_no_room(error: OSError) -> str:
    """Return the limit that was reached, and what to do; "" if the error says something else."""
    if error.errno == errno.EMFILE:
        return _no_file()
    if error.errno == errno.ENFILE:
        return "too many files are open on this machine, of all users together. Close programs, or ask who runs it."
    if error.errno == errno.EAGAIN:
        return _no_process("process")
    if error.errno == errno.ENOMEM:
        return "the system has no memory for another process. Delete what is no longer needed, or use fewer ranks."
    return ""


def _no_file() -> str:
    most, could_be = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = (
        f"too many files are open. One process may open {most} (ulimit -n), and each rank takes {FILES_OF_A_RANK}. "
        f"Close files and sockets, "
    )
    if could_be == resource.RLIM_INFINITY or could_be > most:
        allowed = 65536 if could_be == resource.RLIM_INFINITY else min(could_be, 65536)
        return text + (
            f"or allow more, here: import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({allowed}, {could_be}))"
        )
    return text + "or have the limit raised: it is the highest that this user may set."


def _no_process(kind: str) -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = "" if most == resource.RLIM_INFINITY else f" This user may have {most} of both (ulimit -u)."
    return (
        f"the system has no room for another {kind}.{limit} A container may have a limit of its own. "
        f"End processes that are not needed, use fewer ranks, or have the limit raised."
    )
