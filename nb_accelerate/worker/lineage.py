"""Who dies with whom, and who inherits orphans: Linux' process controls, and what stands in for them elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(parent: int) -> None:
    """End this process, however busy it is, when process `parent` ends.

    Call it in a child that `parent` forked from its main thread: Linux sends the signal when the *thread* that
    forked ends.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), name="nb_accelerate-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


@contextlib.contextmanager
def ending_with(parent: int) -> Iterator[None]:
    """Meanwhile, end this process as soon as process `parent` ends, from which it was started in whichever thread.

    A thread watches. It is gone when this is left, so that what is forked then inherits nothing of it. Nothing happens
    where a process cannot be watched: it takes a process descriptor.
    """
    try:
        process = os.pidfd_open(parent)
    except (AttributeError, OSError):  # not on macOS, not on old or emulated kernels; or it has ended
        process = -1
    if os.getppid() != parent:
        os._exit(1)
    if process < 0:
        yield
        return
    wake_read, wake_write = os.pipe()

    def watch() -> None:
        if process in wait([process, wake_read]):
            os._exit(1)

    thread = threading.Thread(target=watch, name="nb_accelerate-parent")
    thread.start()
    try:
        yield
    finally:
        os.close(wake_write)
        thread.join()
        os.close(wake_read)
        os.close(process)


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent ends. False where the system cannot do that."""
    return sys.platform == "linux" and _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """What ``top`` and ``ps -o comm`` call this process: at most 15 characters."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def step_back() -> None:
    """Never push another process from its core when there is something to do here; the share of time stays the same."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def children() -> list[int]:
    """Process ids of the children of this process, zombies too, that do not end by themselves."""
    return [child.pid for child in psutil.Process().children() if not _is_tracker(child)]


def has_others(known: Collection[int]) -> bool:
    """May this process, which has one thread, have children besides these? Microseconds where Linux lists them."""
    try:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_bytes()
    except OSError:  # not Linux, or built without it
        return True
    return not {int(pid) for pid in listed.split()} <= set(known)


def _is_tracker(process: psutil.Process) -> bool:
    """Multiprocessing's tracker: it ends with the last process that uses it, and removes what they left behind."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _prctl(option: int, value: int) -> bool:
    return bool(_LIBC.prctl(option, value, 0, 0, 0) == 0)


def _watch_parent(parent: int) -> None:
    # macOS has no parent-death signal; a change of parent is all there is to see.
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
