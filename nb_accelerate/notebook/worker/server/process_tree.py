"""Parents, children, orphans and process groups: Linux' process controls, and substitutes for them elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from nb_accelerate.base.helper_threads import HelperThread

if TYPE_CHECKING:
    from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_WATCH_INTERVAL = 0.5  # seconds between two looks whether the parent has ended, where the system does not tell

_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(parent: int) -> None:
    """End this process, however busy, when the process `parent` ends, which has forked it from its main thread."""
    # Linux sends the signal when the *thread* that forked ends.
    if not _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        HelperThread(_watch_parent, parent, threading.Event(), name="parent").start()
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


@contextlib.contextmanager
def ending_with(parent: int) -> Iterator[None]:
    """End this process if the process `parent` ends while the block runs, whichever thread of it started this one."""
    # A thread watches. It has ended when the block is left, so that what is forked then inherits nothing of it.
    is_left = threading.Event()
    thread = HelperThread(_watch_parent, parent, is_left, name="parent")
    thread.start()
    try:
        yield
    finally:
        is_left.set()
        thread.join()


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
    """Return the process ids of the children of this process, which must have one thread; zombies too."""
    # Linux lists them within microseconds, the newest last. A child leaves the list only when this process reaps it.
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # noqa: PTH123 - pathlib is slow
            return [int(pid) for pid in file.read().split()]
    except OSError:  # not Linux, or built without it
        with contextlib.suppress(psutil.Error):  # Linux without /proc lists no processes
            return [child.pid for child in psutil.Process().children()]
        return []


def is_tracker(pid: int) -> bool:
    """Return whether a process is multiprocessing's resource tracker, which ends with the last process that uses it."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def open_process(pid: int) -> int:
    """Return a descriptor of a process, readable when it has ended; -1 where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not on macOS, not on old or emulated kernels; or it has ended
        return -1


def send_signal(pid: int, signum: int) -> bool:
    """Send a signal to a process; do nothing if it has ended. Return False if it belongs to another user."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
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


def _prctl(option: int, value: int | bytes) -> bool:
    """Set something for this process. Return False where that is not Linux', or a sandbox refuses it."""
    return _LIBC is not None and bool(_LIBC.prctl(option, value, 0, 0, 0) == 0)


def _watch_parent(parent: int, is_left: threading.Event) -> None:
    # Where there is no parent-death signal, only a change of the parent's id shows that it has ended.
    while not is_left.wait(_WATCH_INTERVAL):
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
