"""The kernel's side of a server that is a fork of this process; see `notebook.worker.server.forked`."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.base.imported import imported
from nb_accelerate.base.seam import training_half
from nb_accelerate.errors import StartError
from nb_accelerate.notebook.launch.local import Owner, close_all_kernel_ends
from nb_accelerate.notebook.launch.rendezvous import close_keepers
from nb_accelerate.notebook.launch.servers import CLOSE_TIMEOUT, RankServer
from nb_accelerate.notebook.protocol.channel import Channel
from nb_accelerate.notebook.protocol.interrupts import interrupts_later
from nb_accelerate.notebook.worker.server.forked import ForkedRank, serve_forked
from nb_accelerate.notebook.worker.server.interpreter import own_path
from nb_accelerate.notebook.worker.server.limits import why_no_room
from nb_accelerate.notebook.worker.server.scratch import Scratch, remove_abandoned

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Sequence

    from nb_accelerate.notebook.launch.local import LocalRank


class ForkedServer(RankServer):
    """A fork of this process for each start of ranks, which have everything that is in memory here.

    It stands between this process and the ranks so that they are owned, watched and cleaned up as others are, and by a
    thread that lives as long as they do.
    """

    def __init__(self, call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> None:
        super().__init__()
        self._call = call
        self._handles: Sequence[LocalRank] = ()
        self._reaper: HelperThread | None = None
        self._owner: Owner
        importlib.import_module("tqdm.std")  # every rank needs it: imported once, before they are forked
        if imported("torch") is not None:  # then every rank needs this too, to connect
            training_half()

    @override
    def start(self, handles: Iterable[LocalRank]) -> None:
        self.close()
        handles = list(handles)
        keys = [next(self._keys) for _ in handles]
        scratch = Scratch()
        with contextlib.ExitStack() as undo:
            for key in keys:
                undo.callback(scratch.remove, str(key))
            ranks = [
                ForkedRank(key=key, mark=handle.mark, scratch=scratch.make(str(key)), fds=handle.start_fds)
                for key, handle in zip(keys, handles, strict=True)
            ]
            self._channel, there = Channel.pair()
            undo.callback(self._channel.close)
            with there, interrupts_later():
                owner = self._fork(handles, ranks, there, scratch)
                undo.pop_all()
                scratch.leave()  # it is the server's
                for key, handle in zip(keys, handles, strict=True):
                    self._tell(handle, key, owner)

    def _fork(
        self, handles: Sequence[LocalRank], ranks: Sequence[ForkedRank], there: socket.socket, scratch: Scratch
    ) -> Owner:
        parent, path = os.getpid(), own_path()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # what is in a buffer now would be in the child's too
        try:
            pid = os.fork()
        except OSError as error:
            why = why_no_room(error)
            raise StartError(f"this process cannot be forked: {error.strerror}{why and ': '}{why}") from error
        if pid == 0:
            try:
                self._channel.close()
                close_all_kernel_ends()
                close_keepers()
                serve_forked(there.detach(), parent, ranks, scratch, self._call, path)
            finally:
                os._exit(70)  # os.EX_SOFTWARE; only reached if it could not even begin
        # Once its ranks have ended it has only its copy of this process' memory to give back, which takes longer the
        # larger it is: nobody need wait for that.
        owner = Owner(pid, self._channel, serves=True)
        reaper = HelperThread(_reap, pid, name="reaper")
        try:
            reaper.start()
        except RuntimeError as error:
            self._channel.close()  # it ends, with its ranks
            _reap(pid)
            raise StartError(f"there is no room for another thread: {error}") from error
        self._handles, self._reaper, self._owner = handles, reaper, owner
        return owner

    @override
    def forget(self) -> None:
        reaper = self._reaper
        self.close()
        if reaper is not None:
            reaper.join()

    @override
    def close(self) -> None:
        if self._reaper is None:
            return
        self._tell_to_quit()
        is_needed = not all(handle.ended for handle in self._handles) or self._owner.is_given_up
        # It answers when none of them is left.
        if is_needed and self._reaper.is_alive() and not wait([self._channel.fileno()], CLOSE_TIMEOUT):
            self._owner.kill()
        self._channel.close()
        if any(handle.exitcode is None for handle in self._handles):  # it was killed, or never told of them
            self._reaper.join(CLOSE_TIMEOUT)
            remove_abandoned()
        self._reaper = None


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # users' code may have waited for it
        os.waitpid(pid, 0)
