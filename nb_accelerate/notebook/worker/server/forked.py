"""A server that is a fork of the kernel, with the ranks of one launch as forks of its own.

Forking a large process takes milliseconds, and the last rank waits for all of it. After a fork, the first write to each
page copies it, so that the same work costs several times as much here as in the kernel. So the kernel makes beforehand
what it can, the ranks inherit their descriptors, and what is the same in all of them is done once, before they are
forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from nb_accelerate.base.imported import imported
from nb_accelerate.base.seam import training_half
from nb_accelerate.notebook.protocol.channel import Channel
from nb_accelerate.notebook.protocol.messages import RankEnds
from nb_accelerate.notebook.worker.groups import has_group
from nb_accelerate.notebook.worker.rank import prepare_process, run_rank
from nb_accelerate.notebook.worker.server.process_tree import adopt_orphans, set_name, step_back
from nb_accelerate.notebook.worker.server.server import Server, refuse_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.worker.server.scratch import Scratch


@dataclass(frozen=True, kw_only=True)
class ForkedRank:
    """A rank that is to be forked. Its descriptors are the write end of its status pipe, then its `RankEnds`."""

    key: int
    mark: bytes
    scratch: str
    fds: tuple[int, ...]


def serve_forked(
    control_fd: int,
    parent: int,
    ranks: Sequence[ForkedRank],
    scratch: Scratch,
    call: tuple[Any, Any, Any],
    own_path: Sequence[str],
) -> NoReturn:
    """Run the server in a process that was just forked from a kernel. SIGINT is blocked.

    Nothing of the kernel's may be used from here on: its streams, its event loop, its exit handlers.
    """
    # This is the pipe of the kernel's event loop, which signals of this process would wake up.
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})  # ranks are signalled: undo what a thread had blocked
    gc.freeze()  # else the collector would write to, and so copy, the pages of all objects in every rank
    # What a rank has started becomes a child of this process when that rank is killed, and is ended by it.
    adopt_orphans()
    _forget_kernel()
    broken = prepare_process(is_fork=True)
    server = os.getpid()
    pids: list[int] = []
    for rank in ranks:
        try:
            pid = os.fork()
        except OSError as error:
            for missing in ranks[len(pids) :]:
                refuse_rank(missing.key, os.dup(missing.fds[0]), missing.fds[1:], error)
                scratch.remove(str(missing.key))
            break
        if pid == 0:
            try:
                scratch.leave()
                # A rank that keeps ends of another one's pipes would hide from the kernel that the other one has ended.
                for fd in {control_fd, *(fd for other in ranks for fd in other.fds)}.difference(rank.fds[1:]):
                    os.close(fd)
                run_rank(
                    RankEnds.from_tuple(rank.fds[1:]),
                    rank.mark,
                    server,
                    scratch=rank.scratch,
                    inherited=call,
                    broken=broken,
                    own_path=own_path,
                )
            finally:
                os._exit(70)  # os.EX_SOFTWARE; only reached if the rank could not even say what went wrong
        pids.append(pid)
    step_back()  # nothing here is as urgent as what the ranks do, or the kernel when they have ended
    set_name("nb-server")
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # a reader of the kernel's streams would wait for their end until this process ends
        os.dup2(nothing, fd)
    os.close(nothing)
    sys.stdout = sys.stderr = None
    owner = Server(Channel.from_fd(control_fd), parent, scratch)
    for pid, rank in zip(pids, ranks, strict=False):  # there are fewer processes if a fork failed
        owner.own(pid, rank.key, os.dup(rank.fds[0]))
    for fd in {fd for rank in ranks for fd in rank.fds}:
        os.close(fd)
    # SIGINT is unblocked after the forks: the server ignores it, and each rank has set its own handler first.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    owner.run()


def _forget_kernel() -> None:
    """Replace the copies of the kernel's streams, loops and pools in this process."""
    # A stream of the kernel's would send over its sockets, and can hang for ever on a lock that another thread held
    # when the process forked.
    if has_group():
        training_half().forget_groups()
    sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = io.StringIO()  # type: ignore[misc, assignment]
    asyncio._set_running_loop(None)  # noqa: SLF001 - what asyncio offers for a forked child
    with contextlib.suppress(Exception):
        asyncio.set_event_loop(None)
    # `multiprocessing.Process` does this in a child too: the parent's children and finalizers are not ours.
    multiprocessing = imported("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing._children.clear()  # noqa: SLF001 - see above
    util = imported("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()  # noqa: SLF001 - see above
        util._run_after_forkers()  # noqa: SLF001 - see above
