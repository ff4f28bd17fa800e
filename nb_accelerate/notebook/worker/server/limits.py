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

_FILES_OF_A_RANK = 11  # descriptors that the kernel has open for each rank while it starts, with the rank's own


def limits() -> tuple[tuple[int, int], ...]:
    """Return the limits of this process on open files and processes, each as (soft, hard)."""
    return tuple(map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)))


@contextlib.contextmanager
def explain_resource_errors() -> Iterator[None]:
    """Turn an error inside the block about a limit of the system into one that says what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = why_no_room(error)
        if not reason:
            raise
        raise StartError(f"ranks cannot be started: {reason}") from error


def why_no_room(error: OSError | RuntimeError) -> str:
    """Return the limit that was reached, and what to do; "" if the error says something else."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)  # Python's threads, and torch's store, raise a RuntimeError with the text of the system
    if number == errno.EMFILE or os.strerror(errno.EMFILE) in text:
        most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = 65536 if hard == resource.RLIM_INFINITY else hard
        more = "have the limit raised: it is the highest that this user may set"
        if allowed > most:
            more = f"allow more, here: import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({allowed}, {hard}))"
        return (
            f"too many files are open. One process may open {most} (ulimit -n), and each rank takes "
            f"{_FILES_OF_A_RANK}. Close files and sockets, or {more}"
        )
    if number == errno.ENFILE:
        return "too many files are open on this machine, of all users together. Close programs, or ask who runs it."
    if number == errno.EAGAIN or "can't start new thread" in text or os.strerror(errno.EAGAIN) in text:
        most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = "" if most == resource.RLIM_INFINITY else f" This user may have {most} of both (ulimit -u)."
        return (
            f"the system has no room for another {'process' if number else 'thread'}.{limit} A container may have a "
            f"limit of its own. End processes that are not needed, use fewer ranks, or have the limit raised."
        )
    if number == errno.ENOMEM:
        return "the system has no memory for another process. Delete what is no longer needed, or use fewer ranks."
    return ""
