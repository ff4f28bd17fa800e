"""What the launchers of one launch, one on each machine, tell one another.

::

    machine 0:  Machines.serve  <-- what it is and does, rows of its ranks --  others: Machines.connect
                                -- table of all machines -->

Each machine sends all it has to say, as one line of JSON, whenever something changes and at least every `BEAT_INTERVAL`
seconds. So a line that is lost does no harm, a machine without network is noticed by its silence, and one whose launch
was killed by the end of its connection. Ranks exchange tensors by themselves; nothing here is in their way.

The table also has machines that are gone: their addresses are what errors name.

More than 400 lines: all of it reads or changes that table, under one lock.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ConfigError, MachineError
from nb_accelerate.helper_threads import HelperThread
from nb_accelerate.launch.links import Link, connect_until
from nb_accelerate.launch.machine_state import DONE, FAILED, Machine, NotALaunchError, refusal, silence_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BEAT_INTERVAL = 0.5
"""Seconds between two lines of a machine that has nothing new to say."""

_ANSWER_LIMIT = 15.0
"""Seconds for the first machine to answer one that has connected, if it began to listen at the last moment."""

_FLUSH_INTERVAL = 0.01
"""Seconds between two attempts to send the last line to a machine that does not read."""

_CLOSING_LIMIT = 2.0
"""Seconds for the last line to be sent; the thread gets twice that to end."""

_CONNECTION_LOST = "was killed, or that machine has gone down"


@dataclass(eq=False)
class _Peer:
    """Another machine that this one is connected to.

    Attributes:
        link: the connection.
        number: which machine it is; None until it has said so.
        rows: of its ranks.
    """

    link: Link
    number: int | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)


class Machines:
    """The machines of one launch, as the launcher of one of them knows them. `close` it.

    Args:
        me: this machine.
        listener: the socket on which machine 0 listens; None on the others.
        link: the connection to machine 0; None there.

    Attributes:
        is_first: this is machine 0, which the others are connected to.
        is_waited_for: returns whether a machine waits to take part in the launch. Called in the thread of machine 0.
        silence_limit: seconds without a line after which another machine counts as lost.
        refused: sentences about machines that were not let in, as machine 0 knows them.
        ends_as: what `close` tells the others: how the launch of this machine has ended.
    """

    def __init__(
        self, me: Machine, *, listener: socket.socket | None = None, link: socket.socket | None = None
    ) -> None:
        self.is_first = listener is not None
        self.is_waited_for: Callable[[], bool] = lambda: False
        self.ends_as = FAILED
        self.silence_limit = silence_limit(None)
        self._rows: Callable[[], Sequence[dict[str, Any]]] = tuple
        self._me = me
        self._table = {me.number: me} if self.is_first else {}
        self._listener = listener
        self._peers = [] if link is None else [_Peer(Link(link))]
        self.refused: list[str] = []
        self._why_refused = ""
        self._regroup = ""
        self._ending = False
        self._changed = threading.Condition()
        self._wake_reads, self._wake_writes = socket.socketpair()
        for end in (self._wake_reads, self._wake_writes):
            end.setblocking(False)
        self._failure: MachineError | None = None
        self._thread = HelperThread(self._run, name="machines", on_failure=self._failed)
        self._thread.start()

    @classmethod
    def serve(cls, listener: socket.socket, address: str, **facts: Any) -> Machines:
        """Be machine 0.

        Args:
            listener: a socket that listens; it is then this object's.
            address: of this machine.
            facts: other attributes of a `Machine`.
        """
        listener.setblocking(False)
        return cls(Machine(number=0, address=address, host=socket.gethostname(), **facts), listener=listener)

    @classmethod
    def connect(cls, place: tuple[str, int], address: str, deadline: float, **facts: Any) -> Machines:
        """Be another machine: connect to machine 0, and wait until it has this one in its table.

        Args:
            place: address and port of machine 0.
            address: of this machine, as the others reach it.
            deadline: until when, as `time.monotonic`.
            facts: other attributes of a `Machine`.

        Raises:
            OSError: machine 0 does not answer.
            ConfigError: machine 0 refused this one: its number is taken, or it was told another number of machines or
                processes.
        """
        link = connect_until(place, deadline)
        machines = cls(Machine(number=-1, address=address, host=socket.gethostname(), **facts), link=link)
        deadline = max(deadline, time.monotonic() + _ANSWER_LIMIT)  # it may have begun to listen at the last moment
        try:
            machines.wait_for(lambda: bool(machines._table or machines._why_refused) or not machines._peers, deadline)
            if machines._why_refused:
                raise ConfigError(machines._why_refused)
            if not machines._table:
                raise NotALaunchError("is no launch of this package, or one that has ended")
        except BaseException:
            machines.close()
            raise
        return machines

    # What is known.

    @property
    def all(self) -> list[Machine]:
        """All machines that ever came, in the order in which they did."""
        with self._changed:
            return sorted(self._table.values(), key=lambda one: one.number)

    @property
    def here(self) -> list[Machine]:
        """Those that have neither ended nor been lost, this one too."""
        return [one for one in self.all if one.is_here]

    def rows_of_others(self) -> list[dict[str, Any]]:
        """Return what the others have told about their ranks; of machine 0 only."""
        with self._changed:
            return [row for peer in self._peers for row in peer.rows]

    def trouble(self, round_id: str) -> MachineError | None:
        """Return why the ranks of this machine cannot go on, if that is so.

        Args:
            round_id: of the rendezvous that they have gone through.
        """
        with self._changed:
            if self._failure is not None:
                return self._failure
            others = [one for one in self._table.values() if one.round_id == round_id and one.number != self._me.number]
        # What a machine says of itself explains more than that another one is gone.
        for one in sorted(others, key=lambda one: not one.failed):
            if one.failed:
                return MachineError(f"on the machine at {one}, {one.failed}", address=one.address)
            if one.lost or one.ended not in ("", DONE):
                return MachineError(f"the launch on the machine at {one} {one.lost or one.ended}", address=one.address)
        return None

    def wants_regrouping(self, round_id: str) -> bool:
        """Return whether the ranks are to start again because a machine has come after their rendezvous."""
        return bool(round_id) and self._regroup == round_id

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until something is known; return whether it is.

        Args:
            condition: called again whenever something was heard.
            deadline: until when, as `time.monotonic`.

        Raises:
            MachineError: nothing will be heard any more.
        """
        with self._changed:
            while not condition():
                if self._failure is not None:
                    raise self._failure
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    # What is told.

    def tell_rows(self, rows: Callable[[], Sequence[dict[str, Any]]] | None) -> None:
        """Tell machine 0 about the ranks of this machine from now on. The function given before is not called again.

        Args:
            rows: returns what to show of them, as JSON values; called in the thread. None to tell nothing.
        """
        with self._changed:  # the thread holds it while it asks for them
            self._rows = rows or tuple

    def wait_for_round(self) -> None:
        """Say that this machine waits for a rendezvous. Why its ranks failed after the last one is still told."""
        self._tell(is_waiting=True)

    def join(self, round_id: str) -> None:
        """Say that the ranks of this machine have gone through a rendezvous."""
        self._tell(round_id=round_id, is_waiting=False, failed="")

    def fail(self, why: str) -> None:
        """Say that the ranks of this machine have failed. The first reason counts."""
        if not self._me.failed:
            self._tell(failed=why)

    def admit(self, listener: socket.socket) -> None:
        """Let machines connect to machine 0 again.

        Args:
            listener: a socket that listens; it is then this object's.
        """
        listener.setblocking(False)
        with self._changed:
            self._listener = listener
        self._wake()

    @property
    def admits(self) -> bool:
        """Whether machines can connect to this one."""
        with self._changed:
            return self._listener is not None

    def admit_no_more(self) -> socket.socket:
        """Return the socket on which machine 0 has listened; it is then the caller's."""
        assert self._listener is not None
        with self._changed:
            listener, self._listener = self._listener, None
        self._wake()
        listener.setblocking(True)
        return listener

    def close(self) -> None:
        """Say how the launch of this machine has ended, and end the connections. Can be repeated."""
        if self._ending:
            return
        self._tell(ended=self.ends_as)
        self._ending = True
        self._wake()
        self._thread.join(2 * _CLOSING_LIMIT)
        self._wake_reads.close()
        self._wake_writes.close()

    def _tell(self, **facts: Any) -> None:
        with self._changed:
            self._me = replace(self._me, **facts)
            if self._me.number in self._table:
                self._table[self._me.number] = self._me
            self._changed.notify_all()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of such bytes
            self._wake_writes.send(b"!")

    # The thread.

    def _run(self) -> None:
        due = 0.0
        try:
            while not self._ending:
                if time.monotonic() >= due:
                    self._beat()
                    due = time.monotonic() + BEAT_INTERVAL
                if self._read(max(0.0, due - time.monotonic())):
                    due = 0.0
                self._look_for_silence()
            deadline = time.monotonic() + _CLOSING_LIMIT
            self._flush(deadline)  # a link that still sends takes no other line
            self._beat()
            self._flush(deadline)
        finally:
            for peer in self._peers:
                peer.link.close()
            if self._listener is not None:
                self._listener.close()

    def _failed(self, _: str, error: BaseException) -> None:
        """Keep why nothing is heard of other machines, which see that this one is lost."""
        with self._changed:
            what = f"the thread that talks to the other machines has failed ({type(error).__name__}: {error})"
            self._failure = MachineError(what, address=self._me.address)
            self._failure.__cause__ = error
            self._changed.notify_all()

    def _beat(self) -> None:
        if self.is_first and self.is_waited_for():
            self._regroup = self._me.round_id
        with self._changed:
            if self.is_first:
                table = [asdict(one) for one in self._table.values()]
                shared = {"table": table, "regroup": self._regroup}
                lines = [(peer, {**shared, "you": peer.number}) for peer in self._peers if peer.number is not None]
            else:
                lines = [(peer, {"me": asdict(self._me), "rows": list(self._rows())}) for peer in self._peers]
        for peer, line in lines:
            self._write(peer, line)

    def _write(self, peer: _Peer, line: dict[str, Any]) -> None:
        try:
            peer.link.write(line)
        except OSError:
            self._drop_when_read(peer)

    def _flush(self, deadline: float) -> None:
        """Send what is left, to those that read."""
        while (late := [peer.link for peer in self._peers if peer.link.is_sending]) and time.monotonic() < deadline:
            wait(late, _FLUSH_INTERVAL)  # type: ignore[arg-type] # it wants no more than a fileno
            for peer in [peer for peer in self._peers if peer.link.is_sending]:
                try:
                    peer.link.flush()
                except OSError:
                    self._drop_when_read(peer)

    def _read(self, seconds: float) -> bool:
        """Wait for lines and take them; returns whether something is to be said now."""
        sources: list[Any] = [self._wake_reads, *(peer.link for peer in self._peers)]
        if (listener := self._listener) is not None:
            sources.append(listener)
        try:
            ready: list[Any] = wait(sources, seconds)
        except ValueError:  # meanwhile the listener was given away, and closed
            return False
        if self._wake_reads in ready:
            self._wake_reads.recv(1 << 10)
        with self._changed:
            if self._listener in ready and self._listener is not None:
                with contextlib.suppress(OSError):
                    link, _ = self._listener.accept()
                    self._peers.append(_Peer(Link(link)))
        news = [self._read_peer(peer) for peer in [one for one in self._peers if one.link in ready]]
        return self._wake_reads in ready or any(news)

    def _read_peer(self, peer: _Peer) -> bool:
        try:
            news = [self._hear(peer, line) for line in peer.link.read()]
        # It has ended, or is no launch of ours. RecursionError: JSON that is nested too deeply.
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._drop(peer)
            return True
        return any(news)

    def _hear(self, peer: _Peer, line: dict[str, Any]) -> bool:
        with self._changed:
            before = self._table
            if self.is_first:
                self._hear_machine(peer, line)
            elif "refused" in line:
                self._why_refused = str(line["refused"])
            else:
                peer.number = 0
                self._me = replace(self._me, number=int(line["you"]))
                found = [Machine(**one) for one in line["table"]]
                self._table = {one.number: one for one in found} | {self._me.number: self._me}
                self._regroup = str(line["regroup"])
            self._changed.notify_all()
            return self.is_first and self._table != before

    def _hear_machine(self, peer: _Peer, line: dict[str, Any]) -> None:
        told = Machine(**line["me"])
        if peer.number is None:
            why_not = refusal([one for one in self._table.values() if one.is_here], told)
            if why_not:
                self.refused.append(f"The one at {told} was refused: {why_not}")
                self._write(peer, {"refused": why_not})
                self._drop(peer)
                return
            peer.number = len(self._table)
        self._table = {**self._table, peer.number: replace(told, number=peer.number)}
        peer.rows = [row for row in line["rows"] if isinstance(row, dict)]

    def _drop_when_read(self, peer: _Peer) -> None:
        """Take what a machine said before its connection ended, how its launch has ended perhaps, and drop it."""
        while peer in self._peers and wait([peer.link], 0):  # type: ignore[list-item] # it wants no more than a fileno
            self._read_peer(peer)
        self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        with self._changed:
            if peer in self._peers:
                self._peers.remove(peer)
                peer.link.close()
                self._lose(peer, _CONNECTION_LOST)
            self._changed.notify_all()

    def _lose(self, peer: _Peer, why: str) -> None:
        known = None if peer.number is None else self._table.get(peer.number)
        if known is not None and known.is_here:
            self._table = {**self._table, known.number: replace(known, lost=why)}
            self._changed.notify_all()

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        with self._changed:
            for peer in self._peers:
                if now - peer.link.heard > self.silence_limit:
                    why = (
                        f"has not been heard of for {self.silence_limit:g} s: that machine is down, or without network"
                    )
                    self._lose(peer, why)
