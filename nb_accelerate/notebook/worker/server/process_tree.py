"""Parents, children, orphans and process groups: Linux' process controls, and substitutes for them elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import psutil

from nb_accelerate.base.helper_threads import HelperThread

if TYPE_CHECKING:
    from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(parent: int) -> None:
    """End this process, however busy it is, when process `parent` ends.

    Call it in a child that `parent` forked from its main thread: Linux sends the signal when the *thread* that
    forked ends.
    """
    if not _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        HelperThread(_watch_parent, parent, name="parent").start()
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


@contextlib.contextmanager
def ending_with(parent: int) -> Iterator[None]:
    """End this process if process `parent` ends while the block runs, whichever thread of it started this one.

    A thread watches. It has ended when the block is left, so that what is forked then inherits nothing of it. Does
    nothing where the system has no process descriptors.
    """
    process = open_process(parent)
    if os.getppid() != parent:
        os._exit(1)
    if process < 0:
        yield
        return
    wake_read, wake_write = os.pipe()

    def watch() -> None:
        if process in wait([process, wake_read]):
            os._exit(1)

    thread = HelperThread(watch, name="parent")
    thread.start()
    try:
        yield
    finally:
        os.close(wake_write)
        thread.join()
        os.close(wake_read)
        os.close(process)


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent ends. Return False where the system cannot do that."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set the name that ``top`` and ``ps -o comm`` show: at most 15 characters."""
    _prctl(_PR_SET_NAME, name.encode())


def step_back() -> None:
    """Make this process preempt no other when it wakes up. Its share of processor time stays the same."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def children() -> list[int]:
    """Return the process ids of the children of this process, which must have one thread; zombies too.

    Linux lists them within microseconds, the newest last. A child leaves the list only when this process reaps it.
    There are none where the system lists no processes, which is Linux without ``/proc``.
    """
    listed = _read(f"/proc/self/task/{os.getpid()}/children")
    if listed is None:  # not Linux, or built without it
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process().children()]
        return []
    return [int(pid) for pid in listed.split()]


def is_tracker(pid: int) -> bool:
    """Return whether a process is multiprocessing's resource tracker.

    It ends with the last process that uses it, and removes shared memory that was left behind.
    """
    return b"multiprocessing.resource_tracker" in (_read(f"/proc/{pid}/cmdline") or b"")


def open_process(pid: int) -> int:
    """Return a descriptor of a process, readable when it has ended; -1 where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not on macOS, not on old or emulated kernels; or it has ended
        return -1


def send_signal(pid: int, signum: int, *, process: int = -1) -> bool:
    """Send a signal to a process; do nothing if it has ended.

    Args:
        process: its descriptor, or -1. It is used instead of `pid` where it can be: the system may have given the id to
            another process meanwhile.

    Returns:
        False if it belongs to another user, as one that was started with sudo does.
    """
    try:
        try:
            signal.pidfd_send_signal(process, signum)
        except ProcessLookupError:
            raise
        except (AttributeError, OSError):  # there is no descriptor; or a sandbox knows the call that opens one only
            os.kill(pid, signum)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def leave_group() -> None:
    """Move this process to a group of its own, so that a signal to the group of its parent does not reach it."""
    with contextlib.suppress(PermissionError):  # it leads a session
        os.setpgid(0, 0)


def join_group_of(pid: int) -> None:
    """Move this process to the group of another one, so that a hard shutdown of a kernel's group ends it too."""
    with contextlib.suppress(PermissionError, ProcessLookupError):  # it has gone, or to another session
        os.setpgid(0, os.getpgid(pid))


def _read(file: str) -> bytes | None:
    """Return what is in a file below ``/proc``, or None if there is none, in a fifth of the time of Python's files."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    data = b""
    with contextlib.suppress(OSError):  # the process has just ended
        while piece := os.read(descriptor, 1 << 14):
            data += piece
    os.close(descriptor)
    return data


def _prctl(option: int, value: int | bytes) -> bool:
    """Set something for this process. Return False where that is not Linux', or a sandbox refuses it."""
    return _LIBC is not None and bool(_LIBC.prctl(option, value, 0, 0, 0) == 0)


def _watch_parent(parent: int) -> None:
    # Without a parent-death signal a change of parent is all there is to see.
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
