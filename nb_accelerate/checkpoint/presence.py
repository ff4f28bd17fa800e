"""Find out without a collective which ranks live, and which will not come to the point where this one waits.

::

    each rank                                         a rank that waits for others
    tells the store its process                   ->  that process has ended, so the rank will not come; of one on
                                                      another machine, nothing has been heard for a while
    a thread, while somebody asks, tells how many ->  more than this rank has begun: it waits in one that comes later,
      collectives it has begun, and whether its       so it has left out what this rank waits in
      function has returned

Ranks run the same program, so all of them have begun the same number of collectives when they come to the same save.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
import weakref
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist

from nb_accelerate.helper_threads import HelperThread
from nb_accelerate.progress_page import here
from nb_accelerate.topology.rank_lists import named

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

logger = logging.getLogger("nb_accelerate")

REPORT_INTERVAL = 0.1
"""Seconds between two looks of the thread whether somebody asks. A look takes some microseconds."""

_MOST_FAILURES = 10
"""Looks of the thread in a row that may fail: the main thread may be just about to leave the group, say."""

_MOST_LOOKS = 1000
"""Looks a second of all ranks together, at most: all of them go to the one process that serves the store."""

_BEAT_EVERY = 1.0
"""Seconds between two signs of life, while somebody asks, for ranks on other machines."""

_SILENT = 60.0
"""Seconds without a sign of life after which a rank on another machine is taken to have ended. A thread cannot give one
while C code of another one holds the interpreter."""

_ALIKE = 1.0
"""Seconds for which a report has to stay the same before it counts: a rank that computes moves on."""

_IDLE = 5.0
"""The same for a rank whose last function has returned while this rank runs a later one, which the other may be
about to begin."""

_CLOCK = 2.0
"""Seconds by which two processes may differ about when a third one was started."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
"""Seconds between the first two looks for a key, which double each time, and at most."""

_ASKED = "asked"


@dataclass(frozen=True)
class Report:
    """How far a rank is, as it tells the others.

    Attributes:
        question: number of the question that it answers.
        call: number of the function that it runs, or has run.
        has_returned: that function has returned.
        collectives: how many of them it has begun.
        place: a number that changes when its main thread moves on.
    """

    question: int
    call: int
    has_returned: bool
    collectives: int
    place: int


@dataclass
class _Known:
    """What this rank knows of another one.

    Attributes:
        process: of the rank; None if it has not told, or runs on another machine.
        is_elsewhere: it runs on another machine.
        beat: its newest sign of life, and `time.monotonic` when that was seen first, or when it was asked for one.
        has_ended: that process has.
        report: the newest.
        since: `time.monotonic` when that report was seen first.
    """

    process: tuple[int, float] | None = None
    is_elsewhere: bool = False
    beat: tuple[bytes, float] = (b"", 0.0)
    has_ended: bool = False
    report: Report | None = None
    since: float = 0.0


class OtherRanks:
    """The ranks of one process group, as one of them sees the others.

    Args:
        group: of all ranks.
        store: that all of them share. Not used by other threads meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup | None, store: Any) -> None:
        assert group is not None
        self._group = weakref.ref(group)
        self._store = dist.PrefixStore("nb_accelerate/presence", store)  # type: ignore[attr-defined] # no stub
        self.rank = group.rank()
        self.world_size = group.size()
        self._known = {rank: _Known() for rank in range(self.world_size)}
        self._question = 0
        self._num_asked = 0
        self._beats_at = 0.0

    @property
    def is_current(self) -> bool:
        """Whether this is still the process group of all ranks."""
        return dist.is_initialized() and dist.group.WORLD is self._group()

    # Of this rank, for the others.

    def announce(self) -> None:
        """Tell which process this rank is. Can be repeated."""
        started = 0.0
        with contextlib.suppress(psutil.Error):  # of a machine that tells nobody about its processes
            started = psutil.Process().create_time()
        self._store.set(f"process {self.rank}", json.dumps([_machine(), os.getpid(), started]))
        self._store.delete_key(f"left {self.rank}")  # a group before, which torch may have given the same keys

    def leave(self) -> None:
        """Tell that this rank comes to its end, or to that of the group, in an orderly way."""
        self._store.set(f"left {self.rank}", "1")

    def report(self, said: Report | None) -> Report | None:
        """Tell how far this rank is, if somebody asks and it is not what was ``said`` last; return what is said now."""
        question = int(self._store.get(_ASKED)) if self._store.check([_ASKED]) else 0
        if not question:
            return None
        now = self._own_report(question)
        if now != said:
            self._store.set(f"report {self.rank}", json.dumps(astuple(now)))
        if time.monotonic() >= self._beats_at:
            self._beats_at = time.monotonic() + _BEAT_EVERY
            self._store.set(f"beat {self.rank}", repr(self._beats_at))
        return now

    # Of the others, for this rank.

    def start_asking(self) -> None:
        """Have the other ranks tell how far they are, until `stop_asking`. Only one rank does so at a time."""
        if not self._question:
            self._num_asked += 1
            self._question = self._num_asked
            self._store.set(_ASKED, str(self._question))
            for known in self._known.values():
                known.beat = (b"", time.monotonic())

    def stop_asking(self) -> None:
        """End what `start_asking` began."""
        if self._question:
            self._question = 0
            self._store.set(_ASKED, "0")  # and not deleted: a rank that is about to read it would wait for another one

    def lives(self, rank: int) -> bool:
        """Return whether a rank is known to live. Of one on another machine nobody knows, unless ranks were asked."""
        known = self._known[rank]
        return not self.has_ended(rank) and (known.process is not None or (known.is_elsewhere and bool(self._question)))

    def any_reports(self, ranks: Iterable[int]) -> bool:
        """Return whether `will_not_come` can tell: one of these ranks lives, and the backend counts collectives."""
        return _collectives_begun(self._group()) is not None and any(map(self.lives, ranks))

    def killed(self, ranks: Iterable[int]) -> list[int]:
        """Return those of some ranks whose processes have ended, and not in an orderly way.

        Of ranks on other machines it is known only after `start_asking`, and a minute later.
        """
        return [rank for rank in ranks if self.has_ended(rank) and not self._has_left(rank)]

    def how_they_ended(self, ranks: Sequence[int]) -> str:
        """Return what is known about ranks that were `killed`, in words."""
        silent = [rank for rank in ranks if self._known[rank].is_elsewhere]
        ended = [rank for rank in ranks if rank not in silent]
        parts = [f"the process of {named(ended)} has ended"] if ended else []
        if silent:
            parts.append(f"nothing was heard of {named(silent)}, on another machine, for {_SILENT:.0f} s")
        return ", and ".join(parts)

    def will_not_come(self, ranks: Iterable[int]) -> list[int]:
        """Return those of some ranks that will not come to where this one is, although nothing has happened to them.

        They wait in a collective that comes later, have returned from their function, or have left. Call `start_asking`
        before.
        """
        return [rank for rank in ranks if self._has_passed_by(rank) or self._has_left(rank)]

    def _has_passed_by(self, rank: int) -> bool:
        known, now = self._known[rank], time.monotonic()
        key = f"report {rank}"
        if not self._store.check([key]):
            return False
        report = Report(*json.loads(self._store.get(key)))
        if report != known.report:
            known.report, known.since = report, now
        own = self._own_report(self._question)
        if report.question != own.question:  # of an earlier wait
            return False
        if report.has_returned:
            return report.call == own.call or now - known.since >= _IDLE
        return report.collectives > own.collectives and now - known.since >= _ALIKE

    def _has_left(self, rank: int) -> bool:
        return bool(self._store.check([f"left {rank}"]))

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank has ended."""
        known = self._known[rank]
        if known.process is None and not known.is_elsewhere and self._store.check([f"process {rank}"]):
            machine, pid, started = json.loads(self._store.get(f"process {rank}"))
            if machine == _machine():
                known.process = (int(pid), float(started))
            else:
                known.is_elsewhere = True
        if known.is_elsewhere:
            return self._is_silent(rank)
        known.has_ended = known.has_ended or (known.process is not None and not _lives(*known.process))
        return known.has_ended

    def _is_silent(self, rank: int) -> bool:
        """Return whether a rank on another machine was asked, and has given no sign of life for too long."""
        if not self._question:
            return False
        known, now, key = self._known[rank], time.monotonic(), f"beat {rank}"
        beat = bytes(self._store.get(key)) if self._store.check([key]) else b""
        if beat != known.beat[0]:
            known.beat = (beat, now)
        return now - known.beat[1] > _SILENT

    def _own_report(self, question: int) -> Report:
        page = here()
        begun = _collectives_begun(self._group()) or 0
        return Report(question, page.request, bool(page.has_returned), begun, _place())


def wait_for_keys(store: Any, keys: Mapping[int, str], other_ranks: OtherRanks, *, timeout: float) -> list[int]:
    """Wait until other ranks have set their keys in a store, as long as these ranks live. Any thread.

    Args:
        store: not used by other threads meanwhile.
        keys: by rank.
        other_ranks: whether these live.
        timeout: seconds to wait for ranks of which it is not known whether they live.

    Returns:
        Ranks that have not set theirs, and will not.
    """
    missing, lost, pause = dict(keys), list[int](), _FIRST_PAUSE
    deadline = time.monotonic() + timeout
    while True:
        # Before the keys are looked at: a rank may set its key and then end.
        ended = [rank for rank in missing if other_ranks.has_ended(rank)]
        missing = {rank: key for rank, key in missing.items() if not store.check([key])}
        is_late = time.monotonic() >= deadline
        lost += [rank for rank in missing if rank in ended or (is_late and not other_ranks.lives(rank))]
        missing = {rank: key for rank, key in missing.items() if rank not in lost}
        if not missing:
            return lost
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


class Reporter:
    """Tells the other ranks what they ask for, in a thread, in whichever process group this rank is."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        self._other_ranks: OtherRanks | None = None
        self._failed: OtherRanks | None = None  # of a group whose store cannot be reached

    def start(self) -> None:
        """Tell which process this is, and begin to listen. Can be repeated."""
        self._join_group()
        if self._thread is None:
            self._thread = HelperThread(self._run, name="presence")
            self._thread.start()
            atexit.register(self.close)

    def close(self) -> None:
        """Tell that this rank leaves, at the end of its process."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        self._leave()

    @property
    def _interval(self) -> float:
        world_size = 1 if self._other_ranks is None else self._other_ranks.world_size
        return max(REPORT_INTERVAL, world_size / _MOST_LOOKS)

    def _join_group(self) -> None:
        if self._other_ranks is None or not self._other_ranks.is_current:
            self._leave()  # others that wait in the group that was destroyed would, as long as this rank lives
            self._other_ranks = other_ranks_here()
            if self._other_ranks is not None:
                self._other_ranks.announce()

    def _leave(self) -> None:
        with contextlib.suppress(Exception):  # who serves the store may have gone before
            if self._other_ranks is not None and self._other_ranks is not self._failed:
                self._other_ranks.leave()

    def _run(self) -> None:
        said: Report | None = None
        num_failures = 0
        while not self._ends.wait(self._interval):
            try:
                self._join_group()
                if self._other_ranks is not None and self._other_ranks is not self._failed:
                    said = self._other_ranks.report(said)
                num_failures = 0
            except (dist.DistError, OSError):  # who serves the store has gone; another group has another one
                logger.debug("this rank cannot tell how far it is", exc_info=True)
                self._failed = self._other_ranks
            except Exception:
                num_failures += 1
                if num_failures == _MOST_FAILURES:  # others may wait for what is told here
                    raise


def other_ranks_here() -> OtherRanks | None:
    """Return the other ranks of the process group that this process is in; None if it is in none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    # The only store that all ranks are sure to share.
    store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    return OtherRanks(dist.group.WORLD, store.clone())


def report_presence() -> None:
    """Have this rank tell the others which process it is, and how far it is when they ask. Can be repeated."""
    _reporter.start()


def _forget() -> None:
    """Begin anew in a process that was forked: the one it was forked from goes on to report."""
    global _reporter  # noqa: PLW0603 - the process has one
    atexit.unregister(_reporter.close)
    _reporter = Reporter()


_reporter = Reporter()

os.register_at_fork(after_in_child=_forget)


def _machine() -> str:
    """Return the host and the namespace of process numbers: where both are equal, a number means one process."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace.stat().st_ino if namespace.exists() else 0}"


def _lives(pid: int, started: float) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    try:
        process = psutil.Process(pid)
        # The number may have been given to a new process, which was started later.
        return abs(process.create_time() - started) < _CLOCK and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it has just ended, or the machine tells nobody about its processes
        return True


def _collectives_begun(group: dist.ProcessGroup | None) -> int | None:
    """Return how many collectives of all ranks this one has begun, in C++ code too; None if that is not counted."""
    if group is None:
        return None
    try:
        backends: dict[int, Any] = {id(one): one for one in map(group._get_backend, group._device_types)}  # noqa: SLF001
        begun: int = sum(one._get_sequence_number_for_group() for one in backends.values())  # noqa: SLF001
    except RuntimeError:
        return None
    return begun


def _place() -> int:
    """Return a number that changes when the main thread moves on."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - the documented way to it
    place = []
    while frame is not None:
        place.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(place))
