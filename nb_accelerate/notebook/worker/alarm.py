"""Take a rank out of a collective that cannot end, because another rank will never join it.

A rank that waits in gloo waits in C code: no signal and no exception reaches it, and gloo has no way to give up. What
it waits for is a connection to another rank, or a key in the store. So a thread breaks those connections and ends waits
for keys, and the collective fails with an ordinary exception, in about 50 ms. A collective of nccl runs on the device,
and can be aborted there. The process group is of no use afterwards.

A rank can be out of its collective before its own thread has acted, because the thread of another rank has broken the
connection. When its own thread acts, the ranks may have met again. So each alarm carries the number of the rendezvous
whose connections are to be broken, and the next rendezvous waits for an alarm that is being answered.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from typing import TYPE_CHECKING

import psutil

from nb_accelerate.notebook.worker.connections import addresses_of, connections, plain_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.protocol.messages import CutOff


# Descriptors that are looked at, one after the other, where the system does not list those in use. It takes 0.1 s.
_MAX_FILES = 1 << 16


class Alarm:
    """Answers `CutOff`, in a thread beside the main one; see `notebook.worker.stack_writer`."""

    def __init__(self, abort_groups: Callable[[], object] = lambda: None) -> None:
        self.abort_groups = abort_groups  # aborts process groups whose collectives run on a device
        self._lock = threading.Lock()
        self._meeting = 0
        self._given_up = -1
        self._stop_waiting: Callable[[], None] = lambda: None

    def begin_rendezvous(self, rendezvous: int) -> None:
        """Begin a rendezvous: alarms about those before it have no effect from now on."""
        with self._lock:
            # The lock waits for an alarm that is being answered: it would break connections that are made from here on.
            self._meeting = rendezvous
            if self._given_up == rendezvous:
                raise ConnectionAbortedError("the other ranks have stopped waiting for this one")

    def is_given_up(self) -> bool:
        return self._given_up == self._meeting

    def on_given_up(self, stop_waiting: Callable[[], None]) -> None:
        """Set what is called, in another thread, to end waits for the store of the current rendezvous."""
        with self._lock:
            self._stop_waiting = stop_waiting

    def answer(self, message: CutOff) -> bool:
        """Break the connections of a rendezvous if it is the current one, and return whether it is."""
        with self._lock:
            # A rendezvous that this rank has not begun is noted too: it fails then, and does not wait for lost ranks.
            self._given_up = message.rendezvous
            if message.rendezvous != self._meeting:
                return False
            self.abort_groups()
            self._stop_waiting()
            cut_connections(message.peers, message.addresses)
            return True


def cut_connections(peers: tuple[int, ...], addresses: tuple[tuple[str, int], ...] = ()) -> int:
    """Break every TCP connection between this process and others, and return how many were broken.

    Args:
        peers: process ids of others on this machine.
        addresses: addresses and ports of others, anywhere; port 0 stands for all.
    """
    try:
        own_connections = connections(psutil.Process())
    except psutil.Error:  # the system lists no connections, like Linux without /proc
        fds = _within_this_machine()
    else:
        peer_addresses = set(addresses)
        for pid in peers:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                peer_addresses |= set(addresses_of(psutil.Process(pid)))
        fds = [
            connection.fd
            for connection in own_connections
            if connection.raddr and connection.fd >= 0
            if peer_addresses & {plain_address(connection.raddr), (plain_address(connection.raddr)[0], 0)}
        ]
    num_cut = 0
    for fd in fds:
        with contextlib.suppress(OSError):  # closed meanwhile
            with socket.socket(fileno=os.dup(fd)) as copy:
                # This acts on the connection, also if others have its descriptor; to close one would not. On a copy,
                # because gloo closes its own when it likes, and the number may be another file's by then.
                copy.shutdown(socket.SHUT_RDWR)
            num_cut += 1
    return num_cut


def _within_this_machine() -> list[int]:
    """Return the descriptors of the TCP connections from this machine to itself, with those to ranks among them."""
    fds = []
    for fd in range(_MAX_FILES):
        with contextlib.suppress(OSError):  # not open, or not connected
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as copy:
                    is_tcp = copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6)
                    if is_tcp and copy.getsockname()[0] == copy.getpeername()[0]:
                        fds.append(fd)
    return fds
