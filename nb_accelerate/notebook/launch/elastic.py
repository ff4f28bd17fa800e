"""Several machines find one another by torch elastic's rendezvous, again at each start of the ranks.

::

    first machine: the store (torch's TCPStore)  <-->  a client of it on each other machine
        torch elastic's state   who takes part in which round, who waits for the next one, heartbeats
        keys of a round         why ranks have failed, which launches have ended
        the ranks' part         where the ranks of a round meet

The launcher of the first machine serves the store as long as the launch lasts. There is no authentication: who speaks
torch's protocol can write keys. Other bytes only end their own connection.

All requests to the store run in helper threads: on a machine without network an answer may never come. The loop acts on
what they find. A machine that is silent is only told, for its ranks may be well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import math
import pickle
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from nb_accelerate.base.config.env import variables_set
from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.errors import ConfigError, MachineError, StartError
from nb_accelerate.notebook.ranks.failing.errors import said_of
from nb_accelerate.notebook.ranks.failing.incidents import IncidentKind, first_cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.ranks.request import Request

_T = TypeVar("_T")

DONE, INTERRUPTED, FAILED = "is done", "was interrupted", "has failed"
"""How the launch of a machine can end, as verbs."""

_STORE_TIMEOUT = timedelta(seconds=60)
"""For an answer of the store, as torchrun's."""

_GRACE = 15.0
"""Seconds after which a wait is ended here, if torch elastic has not ended it when its time was over."""

_LEAVING_LIMIT = 5.0
"""Seconds to leave. On a machine without network that never ends."""

_HEARD_LIMIT = 3.0
"""Seconds for the others to end too, before the store goes that says why this launch has ended."""

_GIVE_UP_LIMIT = 2.0
"""Seconds for a wait that was given up to end; torch elastic looks once in a second."""

_CONNECT_LIMIT = 2.0
"""Seconds of one attempt to connect."""

_RETRY_INTERVAL = 0.2
"""Seconds between two attempts to connect."""

_CHECK_INTERVAL = 0.5
"""Seconds between two checks of the store."""

_WAIT_INTERVAL = 0.05
"""Seconds between two checks whether a wait is to end."""

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's variable. Without it, a machine that joins in a later round waits for an address that only the first round
has (torch 2.13, `DynamicRendezvousHandler.next_rendezvous`)."""


class MachineJoinedError(Exception):
    """The ranks were ended because another machine takes part from now on; no failure."""


class SharedState:
    """torch elastic's backend, whose state can be read here, and whose waits end when they are given up."""

    name = "c10d"

    def __init__(self, backend: Any, is_given_up: Callable[[], bool]) -> None:
        self._backend = backend
        self._is_given_up = is_given_up
        self.now: Any = None

    def get_state(self) -> Any:
        """Return the state and its token, as torch elastic asks for them."""
        if self._is_given_up():
            raise TimeoutError("nobody waits any more")
        return self._read(self._backend.get_state())

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """Set the state if it has not changed since it was read, and return the one that holds, as torch does."""
        return self._read(self._backend.set_state(state, token))

    def machines(self) -> list[str]:
        """Return who takes part, in the order of their numbers. Each text begins with the number given by hand."""
        return sorted(node.addr for node in self.now.participants) if self.now is not None else []

    def _read(self, found: Any) -> Any:
        if found is not None:
            self.now = _StateUnpickler(io.BytesIO(found[0])).load()  # before torch does, which would run any code in it
        return found


_TYPES = {
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous": ("_RendezvousState", "_NodeDesc"),
    "datetime": ("datetime", "timedelta", "timezone"),
}
"""What torch elastic's state consists of."""


class _StateUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        if name not in _TYPES.get(module, ()):
            raise RuntimeError(f"{module}.{name} is not part of the state of a rendezvous")
        return super().find_class(module, name)


class Machines:
    """The machines of a launch: they meet again and again, and watch one another while ranks run. `close` it.

    Args:
        listener: a socket that listens at the endpoint, if this is the first machine; it is then this object's.
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
        conf = {"join_timeout": 600, "keep_alive_interval": 5, "keep_alive_max_attempt": 3, **(options.rdzv_conf or {})}
        self._conf, self._seconds = conf, int(conf["join_timeout"])
        self._beat_interval = int(conf["keep_alive_interval"])
        self._silence_limit = self._beat_interval * int(conf["keep_alive_max_attempt"])
        self._options, self._endpoint, self._check_goes_on = options, endpoint, check
        self._where = "{}:{}".format(*endpoint)
        self._fewest = options.min_nodes or options.num_nodes
        number = f"{self._fewest}:{options.num_nodes}" if self._fewest < options.num_nodes else options.num_nodes
        self._kind = f"{number} machines with num_processes={num_processes}"
        # torch elastic numbers machines in the order of these texts.
        self._me = f"{options.node_rank:06d} {own} ({socket.gethostname()})"
        self._is_first = listener is not None
        self._is_given_up = False
        self._handler: Any = None
        self._state: Any = None
        self._round: Any = None  # the part of the store for the machines of this round
        self._here: list[str] = []
        try:
            self._in_thread(functools.partial(self._connect, listener))
        except BaseException:
            if listener is not None:
                listener.close()
            self._forget()
            raise

    def meet(self) -> tuple[int, int, str]:
        """Wait for the machines. Return the number of this one, how many there are, and a name for this round."""
        from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

        try:
            with variables_set({_OWN_STORE: "1"}):
                info = self._in_thread(self._handler.next_rendezvous)
        except RendezvousTimeoutError:
            here = sorted({self._me, *self._state.machines()})
            missing = sorted({*range(self._fewest)} - {int(machine[:6]) for machine in here})
            who = f"here is {', '.join(map(_shown, here))}"
            if self._options.rdzv_backend == "static" and missing:
                who = f"number {', '.join(map(str, missing))} is missing"
            error = StartError(
                f"{len(here)} of {self._fewest} machines came to {self._where} within {self._seconds} s; {who}. Start "
                f"the same launch on each of them, and see that their clocks agree to some seconds"
            )
        except RendezvousClosedError:
            error = StartError("the launch has ended on another machine: nobody can take part in it any more")
        else:
            self._round, self._here = info.store, self._state.machines()
            return info.rank, info.world_size, f"nb_accelerate {self._options.rdzv_id} {self._state.now.round}"
        # Without the cause: its traceback would keep torch's store, and the port, for as long as the error lives.
        raise error

    def close(self, ended: str) -> None:
        """Leave the launch, which nobody can then take part in, unless the others can go on without this machine.

        Args:
            ended: how the launch has ended here, in words.
        """
        leaving = HelperThread(self._leave, ended, name="leaving")
        leaving.start()
        try:
            leaving.join(_LEAVING_LIMIT)
        finally:
            self._forget()

    # While ranks run: called by the launch, in the thread of its loop.

    def watch(self, request: Request, say: Callable[[str], object]) -> None:
        """Watch the other machines until `close_watch`, and abandon the request when ranks there have failed."""
        self._request, self._say = request, say
        self._news: Exception | None = None
        self._unreachable: Exception | None = None
        self._silent: list[str] = []
        self._told: set[str] = set()
        self._heard_at = time.monotonic()
        self._reason = ""
        self._is_over = self._is_watch_closed = False
        self._wake = threading.Event()
        self._thread = HelperThread(self._run, name="machines", on_failure=self._lost_store)
        self._thread.start()

    def check(self) -> None:
        """Tell the others of a failure here, or abandon the request because of one there."""
        if self._is_over or self._request.done.is_set() or self._tells_own_cause():
            return
        if self._news is not None:
            self._is_over = True
            self._request.abandon(self._news)
        for machine in {*self._silent_now()} - self._told:
            self._told.add(machine)
            self._say(
                f"nothing was heard of the machine at {machine} for {self._silence_limit} s: it is down or without "
                f"network, or its launch is stopped. The ranks of this one go on until they need it"
            )

    def explain(self, error: BaseException | None) -> BaseException | None:
        """Return why the request has failed: the reason of another machine if ranks here only know that they lost it.

        If the reason is here, the others are told. `error` is what the ranks here say; None if they have not failed.
        """
        if self._is_over or self._tells_own_cause() or error is None or not self._request.incidents:
            return error
        # torch elastic looks who is silent when this machine's own heart beats.
        until = time.monotonic() + self._silence_limit + self._beat_interval + 2 * _CHECK_INTERVAL
        while self._thread.is_alive() and self._news is None and time.monotonic() < until:
            if silent := self._silent_now():
                why = "does not answer any more: it was killed, or that machine is down or without network"
                return MachineError(f"the launch on the machine at {silent[0]} {why}", address=silent[0].split()[0])
            self._thread.join(_WAIT_INTERVAL)
        return self._news or self._unreachable or error

    def close_watch(self) -> None:
        """Check no more. What the others are to be told is told."""
        self._is_watch_closed = True
        self._wake.set()
        self._thread.join(_LEAVING_LIMIT)

    def _tells_own_cause(self) -> bool:
        """Return whether ranks have failed here for a reason of this machine, and have the others told."""
        incidents = self._request.incidents
        if all(incident.peer_lost for incident in incidents):
            return False
        self._is_over = True
        cause = first_cause(incidents)
        if cause.kind is not IncidentKind.INTERRUPTED:  # which the end tells
            self._reason = said_of(cause, self._request)
            self._wake.set()
        return True

    def _silent_now(self) -> list[str]:
        is_stuck = self._unreachable is None and time.monotonic() > self._heard_at + self._silence_limit
        return [self._where] if is_stuck else self._silent

    # In helper threads, because the store may never answer.

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_watch_closed  # before the check, which tells what was to be told
            if self._reason:
                self._fail(f"on the machine at {_shown(self._me)}, {self._reason}")
            waiting = self._handler.num_nodes_waiting()
            if self._round.check(["failed"]):  # after it: who waits for the next round may have failed in this one
                machine, why = json.loads(self._round.get("failed"))
                if machine != self._me:
                    self._news = self._news or MachineError(why, address=machine.split()[1])
            elif waiting:
                self._news = self._news or MachineJoinedError("another machine has come")
            lost = sorted({*self._here} - {*self._state.machines(), self._me})
            self._silent = [_shown(machine) for machine in lost if not self._round.check([f"ended {machine}"])]
            self._heard_at = time.monotonic()
            self._wake.wait(0 if is_last else _CHECK_INTERVAL)
            self._wake.clear()

    def _lost_store(self, _: str, error: BaseException) -> None:
        """Keep why nothing is heard any more. Ranks that do not need the first machine go on."""
        if not self._is_watch_closed:  # or it has waited for a machine without network until now
            self._handler._stop_heartbeats()  # noqa: SLF001 - no public way. torch would warn of each
            why = str(error.__cause__ or error).split("\n", maxsplit=1)[0]
            self._unreachable = MachineError(
                f"the launch on the machine at {self._where} has ended or was killed, or that machine is down or "
                f"without network ({type(error).__name__}: {why})",
                address=self._endpoint[0],
            )

    def _fail(self, why: str) -> None:
        """Tell the others why ranks of this machine have failed. The first reason of all machines counts."""
        self._round.compare_set("failed", "", json.dumps([self._me, why]))

    def _leave(self, ended: str) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousError, dynamic_rendezvous

        self._is_given_up = False
        is_range = self._fewest < self._options.num_nodes
        with contextlib.suppress(RuntimeError, RendezvousError):  # the first machine has gone, and its store with it
            # There is no public way to end the handler's thread without a warning of torch's if the store is gone.
            self._handler._stop_heartbeats()  # noqa: SLF001 - as above
            if self._round is not None:
                if ended != DONE:
                    self._fail(f"the launch on the machine at {_shown(self._me)} {ended}")
                self._round.set(f"ended {self._me}", "")
            if self._round is None or (is_range and ended == INTERRUPTED):
                # Or the others would count this machine in until its heartbeats are missed.
                leave = dynamic_rendezvous._RendezvousExitOp()  # noqa: SLF001 - no public way
                self._handler._op_executor.run(leave, time.monotonic() + _LEAVING_LIMIT)  # noqa: SLF001 - as above
            else:
                self._handler.set_closed()
            until = time.monotonic() + _HEARD_LIMIT
            while self._is_first and self._round is not None and time.monotonic() < until:
                if self._round.check([f"ended {machine}" for machine in self._here]):
                    break
                time.sleep(_WAIT_INTERVAL)

    def _forget(self) -> None:
        self._handler = self._state = self._round = None

    def _in_thread(self, action: Callable[[], _T]) -> _T:
        """Run what asks the store, and return what it does. Interrupts, and what `check` raises, end the wait."""
        found: list[_T] = []
        errors: list[BaseException] = []

        def act() -> None:
            importlib.import_module("torch.distributed.elastic.rendezvous")  # takes its time, which does not count

            self._until = time.monotonic() + self._seconds + _GRACE
            found.append(action())

        self._until = math.inf
        thread = HelperThread(act, name="rendezvous", on_failure=lambda _, error: errors.append(error))
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_WAIT_INTERVAL)
                self._check_goes_on()
                if time.monotonic() > self._until:
                    raise self._no_first_machine(TimeoutError("it has all its machines, or no network"))
        except BaseException:
            self._is_given_up = True
            thread.join(_GIVE_UP_LIMIT)
            raise
        from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

        try:
            if errors:
                raise errors[0]
        except (RendezvousTimeoutError, RendezvousClosedError):
            raise
        except (OSError, RuntimeError, RendezvousError) as error:
            raise self._no_first_machine(error.__cause__ or error) from None
        finally:
            errors.clear()  # or the error would keep itself, and torch's store, until garbage is collected
        return found[0]

    def _no_first_machine(self, error: BaseException) -> StartError:
        why = getattr(error, "strerror", None) or str(error).split("\n", maxsplit=1)[0]
        return StartError(
            f"the first machine, {self._where}, did not answer within {self._seconds} s ({why}). Start the same launch "
            f"there, and see that nothing blocks that port"
        )

    def _connect(self, listener: socket.socket | None) -> None:
        from torch._C._distributed_c10d import TCPStore
        from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        options, most = self._options, self._options.num_nodes
        parameters = RendezvousParameters(
            "c10d", self._where, options.rdzv_id, self._fewest, most, self._me, **self._conf
        )
        while True:
            try:
                if self._is_given_up:
                    return
                if listener is None:  # torch would complain about each attempt at length
                    socket.create_connection(self._endpoint, timeout=_CONNECT_LIMIT).close()
                fd = None if listener is None else listener.detach()
                store = TCPStore(
                    *self._endpoint,
                    is_master=fd is not None,
                    wait_for_workers=False,
                    timeout=_STORE_TIMEOUT,
                    master_listen_fd=fd,
                )
                backend = C10dRendezvousBackend(store, options.rdzv_id)
                self._state = SharedState(backend, lambda: self._is_given_up)
                self._handler = create_handler(store, self._state, parameters)
                if not self._handler.is_closed():
                    break
                raise ConnectionError("a launch that has ended is still there")  # the launch of the cell before, say
            except (OSError, RuntimeError, RendezvousError):
                self._forget()
                if self._is_first or self._is_given_up or time.monotonic() > self._until - _GRACE:
                    raise
            time.sleep(_RETRY_INTERVAL)  # nothing tells when somebody begins to listen there
        kind = store.compare_set("nb_accelerate/kind", "", self._kind).decode()
        if kind != self._kind:
            raise ConfigError(
                f"this machine was started for {self._kind}, but the launch at {self._where} for {kind}. Start the "
                "same launch, with the same numbers, on all machines"
            )


def _shown(machine: str) -> str:
    """Name a machine, from the text that torch elastic knows it by: ``10.0.0.2 (its host name)``."""
    return machine[7:]
