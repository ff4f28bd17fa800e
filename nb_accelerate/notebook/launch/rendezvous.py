"""Where the ranks of a launch find one another.

On one machine the store is a file without a name, made here before any rank starts. Each rank gets its descriptor, and
nobody else can open it: nothing listens, so other users of the machine have nowhere to write keys or garbage to. The
port in ``MASTER_PORT`` is kept free for code in ranks that serves a store of its own there. Where torch cannot open
such a file (macOS, or no ``/proc``), the store listens on another port, on a socket that is bound here, to loopback,
and given to rank 0.

Several machines find one another at a store that the ranks use too, see `rendezvous_store`. Which machine serves it is
said by ``node_rank``, or by the address that all were given.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import socket
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.devices import backend_named
from nb_accelerate.base.seam import StoreSpec
from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.launch.machine import interface_of
from nb_accelerate.notebook.launch.rendezvous_store import DONE, FAILED, INTERRUPTED, Machines
from nb_accelerate.notebook.protocol.anonymous_file import anonymous_file
from nb_accelerate.notebook.protocol.interrupts import interrupts_later
from nb_accelerate.notebook.remote.connection_back import address_towards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Literal

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.launch.plan import LaunchPlan

    Meet = Callable[[], contextlib.AbstractContextManager["Rendezvous"]]

_LOOPBACK = "127.0.0.1"

# Port of the store, as accelerate's and torchrun's; only for several machines, which have to know it beforehand.
_DEFAULT_PORT = 29500

_DEFAULT_ELASTIC_PORT = 29400  # port at which machines without numbers meet, as torchrun's

_keepers: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_keepers() -> None:
    """Close the sockets that keep ports free, in a process that was forked from this one to start ranks."""
    for keeper in list(_keepers):
        keeper.close()


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one launch meet, and the number of this machine among all."""

    address: str  # of the store, as every rank reaches it
    port: int  # of the store, or one beside it that is kept free for code in ranks
    node_rank: int
    interface: str  # network interface for gloo and NCCL
    run_id: str
    listener: socket.socket | None  # the bound socket if this machine serves the store, else None
    file: int = -1  # descriptor of the file that is the store, or -1
    store_port: int = 0  # of the store, if `port` is another one; else 0
    keeps_interface: bool = False  # one that the environment names is kept: a cluster knows of faster ones
    num_nodes: int = 1
    world_size: int = 1
    polls: bool = False  # ranks wait for the file in Python; see `training.process.group_store.RendezvousHandler`
    part: str = ""  # of the store, for these ranks; "" if it is theirs alone
    machines: Machines | None = None  # those that take part; None if it is this one alone

    def store_for(self, local_rank: int) -> tuple[StoreSpec, int]:
        """Return what a rank is told of the store, and the descriptor it gets, which the caller closes; or -1."""
        kind: Literal["file", "server", "client"] = "client"
        fd = -1
        if self.file >= 0:
            kind, fd = "file", os.dup(self.file)
        elif self.listener is not None and local_rank == 0:
            # Only that rank keeps the socket: if it ends, connecting fails at once, and does not wait for an accept.
            kind, fd = "server", self.listener.detach()
        spec = StoreSpec(
            kind=kind,
            address=self.address,
            port=self.port,
            store_port=self.store_port or self.port,
            world_size=self.world_size,
            polls=self.polls,
            part=self.part,
        )
        return spec, fd


def is_local(options: LaunchOptions) -> bool:
    """Return whether all ranks are on this machine, so that launches of this process can start one after the other."""
    # With several machines a launch waits for others, which may run in other threads of this process. And it has
    # sockets open that a server forked from this process would keep.
    return options.num_nodes == 1


@contextlib.contextmanager
def open_rendezvous(options: LaunchOptions, plan: LaunchPlan) -> Iterator[Rendezvous]:
    """Agree where ranks meet that are started once."""
    with repeated_rendezvous(options, plan, lambda: None) as meet, meet() as rendezvous:
        yield rendezvous


def repeated_rendezvous(
    options: LaunchOptions, plan: LaunchPlan, check: Callable[[], object]
) -> contextlib.AbstractContextManager[Meet]:
    """Return a context manager with what is called at each start of the ranks, and does what `open_rendezvous` does."""
    if is_local(options):
        return contextlib.nullcontext(functools.partial(_meet_here, options, plan))
    return _at_a_store(options, plan, check)


@contextlib.contextmanager
def _meet_here(options: LaunchOptions, plan: LaunchPlan) -> Iterator[Rendezvous]:
    with contextlib.ExitStack() as stack:
        listener = None
        store_port = 0
        with interrupts_later():  # or nobody would close it
            file = _file_without_name()
            if file >= 0:
                stack.callback(os.close, file)
        port = _keep_free(int(options.use_port or 0), stack)
        if file < 0:
            listener = stack.enter_context(_listen(_LOOPBACK, 0))
            store_port = listener.getsockname()[1]
        yield Rendezvous(
            address=_LOOPBACK,
            port=port,
            node_rank=0,
            interface=plan.loopback,
            run_id=f"nb_accelerate-{secrets.token_hex(4)}",
            listener=listener,
            file=file,
            store_port=store_port,
            world_size=plan.world_size,
            polls=backend_named(plan.backend).polls_store,
        )


def _file_without_name() -> int:
    """Return a descriptor of a file that others can open only by a descriptor they were given.

    It is -1 where a file cannot be opened again by its descriptor: on macOS, or without ``/proc``.
    """
    file = anonymous_file()
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)  # as torch will
    except OSError:
        return -1
    finally:
        os.close(file)


def _keep_free(port: int, stack: contextlib.ExitStack) -> int:
    """Bind a port without listening: nobody else is given it by chance, and code in rank 0 can still listen there."""
    keeper = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    _keepers.add(keeper)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        keeper.bind((_LOOPBACK, port))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:  # no loopback interface, without which one rank can do
            return port or _DEFAULT_PORT
        raise _not_bound(_LOOPBACK, port, error) from error
    return int(keeper.getsockname()[1])


@contextlib.contextmanager
def _at_a_store(options: LaunchOptions, plan: LaunchPlan, check: Callable[[], object]) -> Iterator[Meet]:
    if options.rdzv_endpoint:
        is_static = options.rdzv_backend == "static"
        endpoint = _split(options.rdzv_endpoint, _DEFAULT_PORT if is_static else _DEFAULT_ELASTIC_PORT)
    else:
        endpoint = options.master_addr, int(options.use_port or _DEFAULT_PORT)
    try:
        own_address = address_towards(_resolved(endpoint[0], 9)[1][0])
    except OSError as error:
        raise ConfigError(f"{endpoint[0]!r} cannot be reached from here: {error}") from error
    is_first = options.node_rank == 0
    if options.rdzv_backend == "c10d":
        # Decided here, because torch would look names up to find out.
        is_own = own_address == endpoint[0] or interface_of(endpoint[0]) is not None
        is_host = (options.rdzv_conf or {}).get("is_host", is_own)
        is_first = str(is_host).lower() in ("1", "true", "yes")
    listener = _listen(*endpoint, of_endpoint=bool(options.rdzv_endpoint)) if is_first else None
    address = endpoint[0] if is_first else own_address
    machines = Machines(options, endpoint, address, listener, num_processes=plan.num_processes, check=check)

    @contextlib.contextmanager
    def meet() -> Iterator[Rendezvous]:
        node_rank, part = machines.meet()
        yield Rendezvous(
            address=endpoint[0],
            port=endpoint[1],
            node_rank=node_rank,
            interface=interface_of(own_address) or "",
            run_id=options.rdzv_id,
            listener=None,
            keeps_interface=True,
            num_nodes=options.num_nodes,
            world_size=plan.world_size,
            part=part,
            machines=machines,
        )

    outcome = FAILED
    try:
        yield meet
        outcome = DONE
    except KeyboardInterrupt:
        outcome = INTERRUPTED
        raise
    finally:
        machines.close(outcome)


def _split(endpoint: str, default_port: int) -> tuple[str, int]:
    has_port = endpoint.count(":") == 1 or "]:" in endpoint  # else it may be an address of IPv6
    host, _, port = endpoint.rpartition(":") if has_port else (endpoint, "", "")
    if port and not port.isdigit():
        raise ConfigError(f"rdzv_endpoint={endpoint!r} is not HOST:PORT", options=("rdzv_endpoint",))
    return host.strip("[]"), int(port or default_port)


def _listen(address: str, port: int, *, of_endpoint: bool = False) -> socket.socket:
    """Return a socket that listens; with ``of_endpoint``, errors are about the option ``rdzv_endpoint``."""
    family, where = _resolved(address, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    # A store of an earlier launch on this port may still have connections in TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(1024)  # every rank connects before rank 0 has had time to accept
    except OSError as error:
        listener.close()
        raise _not_bound(address, port, error, of_endpoint=of_endpoint) from error
    return listener


def _not_bound(address: str, port: int, error: OSError, *, of_endpoint: bool = False) -> ConfigError:
    options: tuple[str, ...] = ("rdzv_endpoint",) if of_endpoint else ("use_port",)
    if error.errno == errno.EADDRINUSE:
        taken = f"rdzv_endpoint='{address}:{port}': that port" if of_endpoint else f"use_port={port}"
        advice = "the same on all machines" if of_endpoint else "or leave use_port out on a single machine"
        text = f"{taken} is taken. Write another one, {advice}"
    elif error.errno == errno.EADDRNOTAVAIL and not of_endpoint:
        text = f"master_addr={address!r} is not an address of this machine, but node_rank=0 is the machine that has it"
        options = "master_addr", "node_rank"
    elif error.errno == errno.EADDRNOTAVAIL:
        text = f"rdzv_endpoint='{address}:{port}': {address} is not an address of this machine, which is to serve there"
    else:
        text = f"cannot listen on {address}:{port}: {error.strerror}"
    return ConfigError(text, options=options)


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the family and the address of a machine, of IPv4 if it has one."""
    try:
        addresses = socket.getaddrinfo(host, port)
    except OSError as error:
        raise ConfigError(f"{host!r} cannot be reached from here: {error}") from error
    family, *_, where = min(addresses, key=lambda address: address[0] != socket.AF_INET)
    return family, where
