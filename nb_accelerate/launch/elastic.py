"""torch elastic's rendezvous, over all starts of one launch on several machines.

The machine whose address all were given serves the store of the rendezvous. It counts the machines, gives each its
number, and tells whether others wait to join; all else that machines tell each other goes through `Machines`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nb_accelerate.config.env import variables_set
from nb_accelerate.errors import StartError
from nb_accelerate.helper_threads import HelperThread
from nb_accelerate.launch.links import connect_until
from nb_accelerate.launch.machine_state import INTERRUPTED, JOIN_TIMEOUT, machines_of, no_first_machine, not_all_came
from nb_accelerate.launch.machines import Machines

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from nb_accelerate.config.launch import LaunchOptions

_LAST_CALL = 30.0
"""Seconds for which more machines are waited for when the fewest are there, as torchrun's."""

_STORE_TIMEOUT = timedelta(seconds=60)
"""For an answer of the store, as torchrun's."""

_LEAVING_LIMIT = 5.0
"""Seconds to tell the store that this machine leaves. The machine that serves it may just have become unreachable."""

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's variable. Without it, a machine that joins in a later round waits for an address that only the first round
has (torch 2.13, `DynamicRendezvousHandler.next_rendezvous`)."""

_MACHINES = "nb_accelerate/machines"
"""Key of the store: where `Machines` of the first machine listens."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round of the rendezvous has found out.

    Attributes:
        node_rank: number of this machine.
        num_nodes: how many take part.
        address: where the ranks meet, as ``address:port``.
        listener: the socket bound to this address, if it is on this machine; else None.
    """

    node_rank: int
    num_nodes: int
    address: str
    listener: socket.socket | None


class ElasticRendezvous:
    """Machines that find one another, again and again. `close` it.

    Args:
        options: of the launch.
        place: address and port of the machine that serves the store.
        own: address of this machine.
        listen: returns a socket that listens at an address and port, or raises ConfigError.
        num_processes: ranks on this machine.
        is_host: this machine serves the store.

    Attributes:
        machines: those of the launch.

    Raises:
        StartError: the machine that serves the store does not answer.
        ConfigError: the port is taken, or the launch on that machine has other numbers of machines or ranks.
    """

    def __init__(
        self,
        options: LaunchOptions,
        place: tuple[str, int],
        own: str,
        listen: Callable[[str, int], socket.socket],
        *,
        num_processes: int,
        is_host: bool,
    ) -> None:
        self._conf = dict(options.rdzv_conf or {})
        self._conf.pop("is_host", None)
        self._seconds = float(self._conf.pop("join_timeout", JOIN_TIMEOUT))
        self._fewest, self._most = options.min_nodes or options.num_nodes, options.num_nodes
        self._place, self._own, self._listen = place, own, listen
        self._lock = threading.Lock()
        self._in_round = False
        self._is_over = False
        deadline = time.monotonic() + self._seconds
        facts = {"num_processes": num_processes, "num_nodes": machines_of(options)}
        listener = listen(*place) if is_host else None
        if listener is None:
            self._store = self._reach_store(deadline)
            self.machines = self._reach_machines(deadline, facts)
        else:
            self._store = _store(place, listener)
            table = listen(own, 0)
            self._store.set(_MACHINES, f"{own}:{table.getsockname()[1]}")
            self.machines = Machines.serve(table, own, **facts)
            if self._fewest < self._most:
                self.machines.is_waited_for = self._is_waited_for
        try:
            self._handler = self._make_handler(options.rdzv_id)
        except BaseException:
            self._store = None  # the traceback of the error would keep it, and its port
            self.machines.close()
            raise

    @property
    def _where(self) -> str:
        return f"{self._place[0]}:{self._place[1]}"

    def _reach_store(self, deadline: float) -> Any:
        try:
            # torch would complain about each attempt at length, and could not be interrupted.
            connect_until(self._place, deadline).close()
            return _store(self._place)
        except (OSError, RuntimeError) as error:
            raise no_first_machine(self._where, self._seconds, error) from None

    def _reach_machines(self, deadline: float, facts: dict[str, Any]) -> Machines:
        try:
            host, _, port = self._store.get(_MACHINES).decode().rpartition(":")
            return Machines.connect((host, int(port)), self._own, deadline, **facts)
        except (OSError, RuntimeError) as error:
            raise no_first_machine(self._where, self._seconds, error) from None

    def _make_handler(self, run_id: str) -> Any:
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

        timeouts = {"last_call": _LAST_CALL} | {
            name.removesuffix("_timeout"): float(value)
            for name, value in self._conf.items()
            if name in ("last_call_timeout", "close_timeout")
        }
        keeps = {name: int(value) for name, value in self._conf.items() if name.startswith("keep_alive_")}
        return DynamicRendezvousHandler.from_backend(
            run_id,
            self._store,
            C10dRendezvousBackend(self._store, run_id),
            self._fewest,
            self._most,
            self._own,
            RendezvousTimeout(
                join=timedelta(seconds=self._seconds),
                **{name: timedelta(seconds=value) for name, value in timeouts.items()},
            ),
            **keeps,
        )

    @contextlib.contextmanager
    def next_round(self) -> Iterator[Round]:
        """Wait for the machines, and give them numbers. Ends what was before.

        Raises:
            StartError: not all machines came, or the launch has ended elsewhere.
        """
        info = self._wait_for_machines()
        with contextlib.ExitStack() as stack:
            listener = None
            if info.rank == 0:
                listener = stack.enter_context(self._listen(self._own, 0))
                info.store.set("nb_accelerate/ranks", f"{self._own}:{listener.getsockname()[1]}")
            address = info.store.get("nb_accelerate/ranks").decode()
            self.machines.join(address)
            with self._lock:
                self._in_round = True
            yield Round(node_rank=info.rank, num_nodes=info.world_size, address=address, listener=listener)

    def _wait_for_machines(self) -> Any:
        from torch.distributed.elastic.rendezvous import (
            RendezvousClosedError,
            RendezvousError,
            RendezvousTimeoutError,
        )

        with self._lock:
            self._in_round = False
        self.machines.wait_for_round()
        try:
            with variables_set({_OWN_STORE: "1"}):
                return self._handler.next_rendezvous()
        except RendezvousTimeoutError:
            self._is_over = True
            missing = not_all_came(self.machines.all, self._fewest, self._where, self._seconds, self.machines.refused)
        except RendezvousClosedError:
            self._is_over = True
            ended = [str(one) for one in self.machines.all if not one.is_here]
            who = f"the machine at {ended[0]}" if ended else "another machine"
            missing = StartError(f"{who} has ended this launch: nobody can take part in it any more")
        except RendezvousError as error:
            self._is_over = True
            missing = no_first_machine(self._where, self._seconds, error)
        # Without the cause: its traceback would keep torch's store, and the port, for as long as the error lives.
        raise missing

    def _is_waited_for(self) -> bool:
        with self._lock:  # the handler is not for two threads at once
            if not self._in_round:
                return False
            with contextlib.suppress(RuntimeError):  # of the store, which is this machine's own
                return bool(self._handler.num_nodes_waiting())
            return False

    def close(self) -> None:
        """Leave. Nobody can join any more, unless this machine was interrupted and the others can go on without it."""
        with self._lock:
            self._in_round = False
        first = self.machines.all[:1]
        goes_on = self._fewest < self._most and self.machines.ends_as == INTERRUPTED
        self.machines.close()
        handler: Any = self._handler
        self._handler = self._store = None
        is_out_of_reach = bool(first and first[0].lost)  # and its store with it
        # There is no public way to end the handler's thread without closing the rendezvous.
        only_stop = goes_on or self._is_over or is_out_of_reach
        leave = handler._stop_heartbeats if only_stop else handler.shutdown  # noqa: SLF001 - as above
        # In a thread: who asks a machine without network waits for the store's timeout, and heartbeats ask too.
        leaving = HelperThread(leave, name="leaving")
        leaving.start()
        if not is_out_of_reach:  # it may be all the same, so not without a limit
            leaving.join(_LEAVING_LIMIT)


def _store(place: tuple[str, int], listener: socket.socket | None = None) -> Any:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        *place,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=None if listener is None else listener.detach(),
    )
