"""The host of a machine whose ranks are none: it says what ranks would say, so that a thousand fit on this one.

A cell ``pass`` is answered at once. In ``train`` a rank says on its page for some seconds that it takes steps, and in
``die`` the last rank ends.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from typing import Any

from nb_accelerate.base.progress_page import PageReader
from nb_accelerate.base.progress_page.page import ProgressPage
from nb_accelerate.notebook.launch.host import Host
from nb_accelerate.notebook.protocol.messages import (
    NOTHING,
    Call,
    CellEnd,
    Join,
    Parcel,
    Quit,
    Ready,
    Result,
    RunCell,
    Setup,
)
from nb_accelerate.notebook.remote.frames import Kind, pack_message, unpack_message
from nb_accelerate.notebook.remote.mirror import PageWatch, pack_pieces, unpack_pieces

SECONDS = 5.0
"""That ``train`` takes."""


class SimulatedRank:
    """What a `HostedRank` is to its host."""

    def __init__(self, host: SimulatedHost, key: int, rank: int) -> None:
        self._host, self._key, self._rank = host, key, rank
        self.handle = self  # of which nothing is to be killed
        reader = PageReader()
        self.page, self._writes = PageWatch(reader), ProgressPage(reader.buffer)
        self._steps, self._until = 0, 0.0

    def told(self, message: object) -> None:
        if isinstance(message, Setup):
            self._say(Ready(pid=os.getpid()))
        elif isinstance(message, Join):
            self._say(Result(parcel=Parcel(pickled=pickle.dumps("cpu"))))
        elif isinstance(message, Call):  # for the kernel's search path, say
            self._say(Result(parcel=NOTHING))
        elif isinstance(message, Quit):
            self._host.end_of(self._key, 0)
        elif isinstance(message, RunCell) and message.code.strip() == "die" and self._rank == message.num_ranks - 1:
            self._host.end_of(self._key, -signal.SIGKILL)
        elif isinstance(message, RunCell):
            self._writes.begin_request()
            if message.code.strip() == "train":
                self._writes.begin_loop(total=1000, rows=32, epoch=1, evaluates=False)
                self._steps, self._until = 0, time.monotonic() + SECONDS
            else:
                self._answer()

    def send_page(self) -> None:
        if self._until:
            self._steps += 1
            self._writes.step(self._steps)
            self._writes.loss(1 / self._steps)
        if pieces := self.page.changed():
            self._host.sender.send(Kind.PAGE, self._key, pack_pieces(pieces))
        if self._until and time.monotonic() > self._until:
            self._until = 0.0
            self._answer()

    def look(self) -> None:
        """Nothing is wrong with its process."""

    def kill(self) -> None:
        """It has none."""

    def _answer(self) -> None:
        self._writes.end_request()
        self._say(CellEnd(answer=Result(parcel=NOTHING), steps={}))

    def _say(self, message: object) -> None:
        self._host.sender.send(Kind.MESSAGE, self._key, pack_message([]), pickle.dumps(message, protocol=5))
        self._host.sender.send(Kind.HAND_ON, self._key)


class SimulatedHost(Host):
    """Has ranks of that kind."""

    def _server(self, *, fresh: bool) -> Any:
        return None

    def _start(self, key: int, *, rank: int, **_: Any) -> None:
        self._ranks[key] = SimulatedRank(self, key, rank)  # type: ignore[assignment]

    def _close(self) -> None:
        self.sender.close(drop=True)

    def _tell(self, rank: Any, frame: Any) -> None:
        if frame.kind == Kind.MESSAGE:
            rank.told(pickle.loads(unpack_message(frame.body)[1]))
        elif frame.kind == Kind.PAGE:
            rank.page.write(unpack_pieces(frame.body))
        elif frame.kind == Kind.SIGNAL and frame.body[-1] == signal.SIGKILL:
            self.end_of(frame.rank, -signal.SIGKILL)

    def end_of(self, key: int, exitcode: int) -> None:
        if self._ranks.pop(key, None) is not None:
            self.sender.send(Kind.END, key, json.dumps({"exitcode": exitcode, "lost": ""}).encode())


if __name__ == "__main__":
    reads, writes = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    SimulatedHost(reads, writes).run()
    sys.exit()
