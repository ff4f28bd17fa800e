"""Several machines find one another by torch elastic's rendezvous, again at each start of the ranks.

::

    first machine: the store (torch's TCPStore)  <-->  a client of it on each other machine
        torch elastic's state   who takes part in which round, who waits for the next one, heartbeats
        keys of a round         why ranks have failed, which launches answer, which have ended
        the ranks' part         where the ranks of a round meet

The launcher of the first machine serves the store as long as the launch lasts. There is no authentication: who speaks
torch's protocol can write keys. Other bytes only end their own connection.

All requests to the store run in a helper thread: on a machine without network an answer may never come.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from nb_accelerate.base.config.env import variables_set
from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.errors import ConfigError, MachineError, StartError
from nb_accelerate.notebook.launch.machines import Machine, machines_of, no_first_machine, not_all_came, refusal
from nb_accelerate.notebook.launch.shared_state import Round, SharedState

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.base.config.launch import LaunchOptions

_T = TypeVar("_T")

JOIN_TIMEOUT = 600.0
"""Seconds for all machines to come, as torchrun's; ``rdzv_conf={"join_timeout": ...}`` says another number."""

DONE = "is done"
INTERRUPTED = "was interrupted"
FAILED = "has failed"
"""How the launch of a machine can end, as verbs."""

_LAST_CALL = 30.0
"""Seconds for which more machines are waited for when the fewest are there, as torchrun's."""

_STORE_TIMEOUT = timedelta(seconds=60)
"""For an answer of the store, as torchrun's."""

_GRACE = 15.0
"""Seconds after which a wait is ended here, if torch elastic has not ended it when its time was over."""

_LEAVING_LIMIT = 5.0
"""Seconds to leave. On a machine without network that never ends."""

_GIVE_UP_LIMIT = 2.0
"""Seconds for a wait that was given up to end; torch elastic looks once in a second."""

_HEARD_LIMIT = 3.0
"""Seconds for the others to end too, before the store goes that says why this launch has ended."""

_CONNECT_LIMIT = 2.0
"""Seconds of one attempt to connect."""

_RETRY_INTERVAL = 0.2
"""Seconds between two attempts to connect."""

_CHECK_INTERVAL = 0.05
"""Seconds between two checks whether a wait is to end."""

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's variable. Without it, a machine that joins in a later round waits for an address that only the first round
has (torch 2.13, `DynamicRendezvousHandler.next_rendezvous`)."""

_FIRST = "nb_accelerate/first machine"
"""Key of the store: the first machine."""


class MachineJoinedError(Exception):
    """The ranks were ended because another machine takes part from now on; no failure."""


class ElasticRendezvous:
    """Machines that find one another, again and again. `close` it.

    Args:
        listener: a socket that listens there, if this is the first machine; it is then this object's.
        check: called again and again while machines are waited for; raises why nobody waits any more.
    """

    def __init__(
        self,
        options: LaunchOptions,
        endpoint: tuple[str, int],
        own: str,
        listener: socket.socket | None,
        *,
        num_processes: int,
        check: Callable[[], object],
    ) -> None:
        conf = dict(options.rdzv_conf or {})
        self._seconds = float(conf.pop("join_timeout", JOIN_TIMEOUT))
        self._conf = conf
        self._run_id = options.rdzv_id or "none"
        self._fewest, self._most = options.min_nodes or options.num_nodes, options.num_nodes
        self._endpoint, self._check = endpoint, check
        self._me = Machine(
            address=own,
            host=socket.gethostname(),
            node_rank=options.node_rank if options.rdzv_backend == "static" else None,
            num_processes=num_processes,
            num_nodes=machines_of(options),
            launch=secrets.token_hex(4),
        )
        self._is_first = listener is not None
        self.round: Round | None = None
        self._reason = ""
        self._lost: list[Machine] = []
        self._is_given_up = False
        self._store: Any = None
        self._handler: Any = None
        self._state: Any = None
        try:
            self._in_thread(functools.partial(self._connect, listener))
        except BaseException:
            if listener is not None:
                listener.close()
            self._forget()
            raise

    @property
    def where(self) -> str:
        """Address and port of the first machine."""
        return f"{self._endpoint[0]}:{self._endpoint[1]}"

    @property
    def silence_limit(self) -> float:
        """Seconds without a heartbeat after which torch elastic takes a machine for lost."""
        return float(self._conf.get("keep_alive_interval", 5)) * int(self._conf.get("keep_alive_max_attempt", 3))

    def next_round(self) -> Round:
        """Wait for the machines, and number them. Ends what was before."""
        from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

        before = [] if self.round is None else self.round.machines
        try:
            with variables_set({_OWN_STORE: "1"}):
                info = self._in_thread(self._join)
        except RendezvousTimeoutError:
            here = [self._me, *(machine for machine in self._state.machines if machine.launch != self._me.launch)]
            gone = [machine for machine in before if machine not in here]
            missing = not_all_came(here, gone, self._fewest, self.where, self._seconds)
        except RendezvousClosedError:
            missing = StartError("the launch has ended on another machine: nobody can take part in it any more")
        else:
            machines = self._state.machines[: info.world_size]
            for number, machine in enumerate(machines):
                if why := refusal(machines[:number], machine):
                    raise ConfigError(why)
            name = f"nb_accelerate {self._run_id} {self._state.round}"
            self._lost = []
            self.round = Round(store=info.store, node_rank=info.rank, machines=machines, name=name)
            return self.round
        # Without the cause: its traceback would keep torch's store, and the port, for as long as the error lives.
        raise missing

    # In helper threads, because the store may never answer.

    def news(self) -> MachineError | MachineJoinedError | None:
        """Return why the ranks of this machine are to end. Tells the others first what `fail` was given."""
        assert self.round is not None
        self._tell_reason()
        self.round.answer()
        if failure := self.round.failure():
            return failure
        if self._handler.num_nodes_waiting():  # or it has failed meanwhile, and waits for the others
            return self.round.failure() or MachineJoinedError("another machine has come")
        return None

    def silent(self) -> list[Machine]:
        """Return the machines of the round that torch elastic has not heard of for `silence_limit` seconds."""
        assert self.round is not None
        here = self._state.machines
        if all(machine in here for machine in self.round.machines):
            return []
        return [machine for machine in self.round.without("ended") if machine not in here]

    def lost(self) -> MachineError | None:
        """Return an error about the launches that did not answer when `Round.ask_who_is_here` has asked."""
        assert self.round is not None
        self._lost = self.round.without("here")
        for machine in self._lost:
            why = "does not answer any more: it was killed, or that machine is down or without network"
            return MachineError(f"the launch on the machine at {machine} {why}", address=machine.address)
        return None

    def unreachable(self, error: BaseException) -> MachineError:
        """Return the error about the first machine that says that the store is gone."""
        self._handler._stop_heartbeats()  # noqa: SLF001 - no public way. torch would warn of each
        why = str(error.__cause__ or error).split("\n", maxsplit=1)[0]
        return MachineError(
            f"the launch on the machine at {self.where} has ended or was killed, or that machine is down or without "
            f"network ({type(error).__name__}: {why})",
            address=self._endpoint[0],
        )

    def fail(self, why: str) -> None:
        """Note why ranks of this machine have failed, for the others. The first reason counts."""
        self._reason = self._reason or f"on the machine at {self._me}, {why}"

    def close(self, ended: str) -> None:
        """Leave the launch, which nobody can then take part in, unless the others can go on without this machine."""
        leaving = HelperThread(self._leave, ended, name="leaving")
        leaving.start()
        try:
            leaving.join(_LEAVING_LIMIT)
        finally:
            self._forget()

    def _leave(self, ended: str) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousError

        self._is_given_up = False
        handler, state, last = self._handler, self._state, self.round
        goes_on = last is None or (self._fewest < self._most and ended == INTERRUPTED)
        with contextlib.suppress(RuntimeError, RendezvousError):  # the first machine has gone, and its store with it
            # There is no public way to end the handler's thread without a warning of torch's if the store is gone.
            handler._stop_heartbeats()  # noqa: SLF001 - as above
            if last is not None:
                if ended != DONE:
                    self._tell_reason()
                    last.fail(f"the launch on the machine at {self._me} {ended}")
                last.say("ended")
            if goes_on:
                state.leave(self._me.to_text())
            else:
                handler.set_closed()
            until = time.monotonic() + _HEARD_LIMIT
            while self._is_first and last is not None and time.monotonic() < until:
                if all(machine in self._lost for machine in last.without("ended")):
                    break
                time.sleep(_CHECK_INTERVAL)

    def _forget(self) -> None:
        self._handler = self._state = self._store = self.round = None

    def _in_thread(self, action: Callable[[], _T]) -> _T:
        """Run what asks the store, and return what it does. Interrupts, and what `check` raises, end the wait."""
        found: list[_T] = []
        errors: list[BaseException] = []
        thread = HelperThread(
            lambda: found.append(action()), name="rendezvous", on_failure=lambda _, error: errors.append(error)
        )
        thread.start()
        until = time.monotonic() + self._seconds + _GRACE
        try:
            while thread.is_alive():
                thread.join(_CHECK_INTERVAL)
                self._check()
                if time.monotonic() > until:
                    raise no_first_machine(
                        self.where, self._seconds, TimeoutError("it has all its machines, or no network")
                    )
        except BaseException:
            self._is_given_up = True
            thread.join(_GIVE_UP_LIMIT)
            raise
        # Not before, because the first import of torch takes its time too.
        from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

        try:
            if errors:
                raise errors[0]
        except (RendezvousTimeoutError, RendezvousClosedError):
            raise
        except (OSError, RuntimeError, RendezvousError) as error:
            raise no_first_machine(self.where, self._seconds, error.__cause__ or error) from None
        finally:
            errors.clear()  # or the error would keep itself, and torch's store, until garbage is collected
        return found[0]

    def _connect(self, listener: socket.socket | None) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousError

        if listener is not None:
            if not self._is_given_up:  # while torch was imported
                self._make_handler(_store(self._endpoint, listener))
                self._store.set(_FIRST, self._me.to_text())
            return
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                # torch would complain about each attempt at length.
                socket.create_connection(self._endpoint, timeout=_CONNECT_LIMIT).close()
                self._make_handler(_store(self._endpoint))
                if not self._handler.is_closed():
                    break
                raise ConnectionError("a launch that has ended is still there")  # the launch of the cell before, say
            except (OSError, RuntimeError, RendezvousError):
                self._forget()
                if self._is_given_up or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_INTERVAL)  # nothing tells when somebody begins to listen there
        first = Machine.from_text(self._store.get(_FIRST).decode())
        known = first.address, self._me.address
        # One of this address may be the launch before this one, which was killed: torch elastic will miss it.
        others = [machine for machine in self._state.machines if machine.address not in known]
        if why := refusal([first, *others], self._me):
            raise ConfigError(why)

    def _make_handler(self, store: Any) -> None:
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

        timeouts = {"join": self._seconds, "last_call": _LAST_CALL} | {
            name.removesuffix("_timeout"): float(value)
            for name, value in self._conf.items()
            if name in ("last_call_timeout", "close_timeout")
        }
        self._store = store
        backend = C10dRendezvousBackend(store, self._run_id)
        self._state = SharedState(backend, self._fewest, lambda: self._is_given_up)
        self._handler = DynamicRendezvousHandler.from_backend(
            self._run_id,
            store,
            self._state,
            self._fewest,
            self._most,
            self._me.to_text(),
            RendezvousTimeout(**{name: timedelta(seconds=value) for name, value in timeouts.items()}),
            **{name: int(value) for name, value in self._conf.items() if name.startswith("keep_alive_")},
        )

    def _join(self) -> Any:
        self._tell_reason()
        return self._handler.next_rendezvous()

    def _tell_reason(self) -> None:
        if self._reason and self.round is not None:
            self.round.fail(self._reason)
            self._reason = ""


def _store(endpoint: tuple[str, int], listener: socket.socket | None = None) -> Any:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        *endpoint,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=None if listener is None else listener.detach(),
    )
