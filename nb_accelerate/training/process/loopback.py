"""Gloo groups of one machine that no other user's process can join.

Gloo listens on a port, and takes any client that sends a small number for a rank: numbers begin at 0, and ports
are listed in ``/proc/net/tcp``. Another user of the machine could so take the place of a rank, read the tensors that
are meant for it and send others. Each group whose members meet through the store of a launch, which only its ranks can
open, is therefore checked before anything is sent in it; a group that meets elsewhere is torch's own::

    listen on a new port --> connect all ranks --> whose are the other ends, as the kernel says?
      ^                                              | only this user's, and all still there: the group is used
      +-- another attempt <--------------------------+ not so on some rank
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import stat
import struct
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

logger = logging.getLogger(__name__)

_ESTABLISHED = 1  # a state of a connection, as the kernel has it

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEADER = 16  # bytes of a netlink message before its content

_ANY_COOKIE = (0xFFFFFFFF, 0xFFFFFFFF)

_TIMEOUT = 20.0  # seconds after which no further attempt is made. One takes some hundredths of a second.

# Seconds of a barrier of ranks that are connected. If it takes longer, there is another attempt.
_BARRIER_TIMEOUT = 2.0

# Stands for a user id that the kernel does not tell: the connection is closed again, or a sandbox hides it.
_UNKNOWN = -1

# Stands for a user id on a rank that could not connect, so that the others do not wait for it in the barrier.
_UNCONNECTED = -2


class _Checked(type):
    """The type of what `install` puts in the place of `ProcessGroupGloo`."""


def install(path: str) -> None:
    """Check the gloo groups that this process, with all its libraries, makes from now on through a store."""
    # Torch has no call after a group was made, so what makes it is replaced.
    module: Any = dist.distributed_c10d
    if not isinstance(module.ProcessGroupGloo, _Checked) and Path("/proc/self/fd").is_dir():
        module.ProcessGroupGloo = _checked(module.ProcessGroupGloo)
    _paths.add(path)


_paths: set[str] = set()  # of stores that only ranks can open


def _checked(original: Any) -> Any:
    """Return a subclass of `original` that makes checked groups; for `isinstance` it stands for `original`."""

    class Meta(_Checked, type(original)):  # type: ignore[misc] # pybind11's
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __call__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
            try:
                inner = store
                while (below := getattr(inner, "underlying_store", None)) is not None:
                    inner = below
                # A group that meets through a store that only ranks can open has members that are all checked.
                is_of_ranks = isinstance(inner, FileStore) and inner.path in _paths  # type: ignore[attr-defined] # no stub
                # With options of its own it is not torch that asks.
                if size == 1 or args or set(kwargs) != {"timeout"} or not is_of_ranks:
                    return original(store, rank, size, *args, **kwargs)
                return _connect(original, store, rank, size, kwargs["timeout"])
            except RuntimeError as error:
                if why := _why_no_interfaces():
                    raise dist.DistBackendError(why) from error
                raise

    return Meta(original.__name__, (original,), {"__module__": original.__module__, "__doc__": original.__doc__})


def _connect(original: Any, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a group with the other ranks; again if a stranger came between on any of them."""
    limit = min(_TIMEOUT, timeout.total_seconds())
    began = time.monotonic()
    barrier_options = dist.BarrierOptions()
    barrier_options.timeout = timedelta(seconds=_BARRIER_TIMEOUT)
    for attempt in itertools.count():
        part = PrefixStore(f"attempt {attempt}", store)
        devices, listeners, before = _listen(original)
        options = original._Options()  # noqa: SLF001 - as torch's own `ProcessGroupGloo` makes them
        options._devices, options._timeout, options._threads = devices, timeout, 2 * len(devices)  # noqa: SLF001
        group: Any = None
        strangers = set()
        try:
            with contextlib.ExitStack() as stack:
                for listener in listeners:
                    stack.enter_context(listener)
                group = original(part, rank, size, options)
                strangers = _strangers(listeners, before)
            stranger_ranks = _said_by_all(part, "are strangers", strangers, rank, size)
            if stranger_ranks <= {_UNKNOWN}:
                group.barrier(barrier_options).wait()  # fails if somebody else has the place of a rank
                # All ranks are there.
                strangers = set()
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or time.monotonic() - began >= limit:
                raise
            logger.debug("attempt %d to connect the ranks failed", attempt, exc_info=True)
            if group is None:
                _said_by_all(part, "are strangers", {_UNCONNECTED}, rank, size)
            group, strangers = None, {_UNKNOWN}  # closes its connections: no other rank waits in the barrier
        stranger_ranks = _said_by_all(part, "were strangers", strangers, rank, size)
        if not stranger_ranks:
            return group
        # Rank 0 says for all whether there is another attempt: they have not the same time.
        if rank == 0:
            part.set("is over", "yes" if time.monotonic() - began >= limit else "")
        if part.get("is over"):
            who = ", ".join(map(str, sorted(stranger_ranks - {_UNKNOWN, _UNCONNECTED}))) or "not known"
            raise dist.DistBackendError(
                f"The ranks cannot be connected: processes of another user of this machine (user id: {who}) connect to "
                "each of their ports and take themselves for a rank. Ask the administrator of the machine to end them."
            )
        group = None
    raise AssertionError


def _why_no_interfaces() -> str:
    """Return why gloo can connect nothing, because it is not told which network interfaces there are; else ""."""
    try:
        socket.if_nameindex()
    except OSError as error:
        return (
            f"gloo cannot be used here: it lists the network interfaces of this machine, and a sandbox refuses that "
            f"({error.strerror}). Have netlink sockets allowed; without, only functions on one rank, or on ranks that "
            f"exchange no tensors, can be launched: notebook_launcher(function, num_processes=1)"
        )
    return ""


def _said_by_all(store: Any, what: str, uids: set[int], rank: int, size: int) -> set[int]:
    """Tell all ranks of a group which user ids this one has found; returns what all of them have found."""
    # The last one reads what each has said: if all did, the time would grow with the square of their number.
    if uids:
        store.set(f"{what}: {rank}", " ".join(map(str, uids)))
    if store.add(f"{what}: ranks that have said it", 1) == size:
        keys = [f"{what}: {other}" for other in range(size)]
        store.set(f"{what}, say all", " ".join(store.get(key).decode() for key in keys if store.check([key])))
    return set(map(int, store.get(f"{what}, say all").split()))


def _listen(original: Any) -> tuple[list[Any], list[socket.socket], set[str]]:
    """Make gloo's devices, as torch chooses them."""
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - pathlib takes ten times as long
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [original.create_device(interface=name) for name in names] or [original.create_default_device()]
    listeners = []
    for opened in _sockets(before):
        if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listeners.append(opened)
        else:
            opened.close()
    return devices, listeners, before


def _sockets(before: Collection[str]) -> Iterator[socket.socket]:
    """Yield copies of the sockets of this process whose descriptors are not in `before`."""
    for entry in set(os.listdir("/proc/self/fd")).difference(before):  # noqa: PTH208 - pathlib is slow
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                yield socket.socket(fileno=os.dup(int(entry)))


def _strangers(listeners: Sequence[socket.socket], before: Collection[str]) -> set[int]:
    """Return the user ids of those who are connected to a port of ours and are not this user."""
    ports = {listener.getsockname()[:2] for listener in listeners}
    accepted = []
    for opened in _sockets(before):
        with opened, contextlib.suppress(OSError):  # it listens, or its other end has gone
            here, peer = opened.getsockname()[:2], opened.getpeername()[:2]
            if here in ports:
                accepted.append((opened.family, here, peer))
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            uids = {_uid_of(kernel, family, peer, here) for family, here, peer in accepted}
    except OSError:
        uids = {_UNKNOWN}
    return uids - {os.geteuid()}


def _uid_of(kernel: socket.socket, family: int, local: tuple[str, int], remote: tuple[str, int]) -> int:
    """Return the user id of who has an established connection, as the kernel says; else `_UNKNOWN`."""
    # See `man 7 sock_diag`. The table `/proc/net/tcp` says it too, and takes tens of milliseconds.
    pack = "!HH16s16s"
    addresses = (socket.inet_pton(family, end[0]).ljust(16, b"\0") for end in (local, remote))
    identity = struct.pack(pack, local[1], remote[1], *addresses) + struct.pack("=III", 0, *_ANY_COOKIE)
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED) + identity
    header = struct.pack("=IHHII", _HEADER + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    kernel.send(header + request)
    answer = kernel.recv(4096)
    if struct.unpack_from("=H", answer, 4)[0] != _SOCK_DIAG_BY_FAMILY:
        return _UNKNOWN
    _, state = struct.unpack_from("=BB", answer, _HEADER)
    uid, inode = struct.unpack_from("=II", answer, _HEADER + 4 + len(identity) + 12)
    return int(uid) if state == _ESTABLISHED and inode else _UNKNOWN
