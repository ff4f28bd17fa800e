"""Several machines find one another at a store (torch's TCPStore), again at each start of the ranks.

::

    first machine: the store  <-->  a client of it on each other machine
        kind                  numbers that all machines are started with
        round                 number of the newest start of the ranks
        ROUND/NUMBER          the machine that has this number in it
        ROUND/NUMBER/there    it still was when all numbers were taken
        ROUND/NUMBER/beats    how often it has looked into the store since then
        ROUND/failed          why ranks have failed: the first reason of all machines counts
        closed, ended/NUMBER  a launch has ended, and nobody can take part any more
        the ranks' part       where the ranks of a round meet

The launcher of the first machine serves the store as long as the launch lasts. There is no authentication: who speaks
torch's protocol can write keys. Other bytes only end their own connection.

All requests to the store run in helper threads: on a machine without network an answer may never come. The loop acts on
what they find.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.errors import ConfigError, LaunchError, MachineError, StartError
from nb_accelerate.notebook.ranks.failing.errors import said_of
from nb_accelerate.notebook.ranks.failing.incidents import IncidentKind, first_cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.ranks.request import Request

DONE, INTERRUPTED, FAILED = "is done", "was interrupted", "has failed"  # how the launch of a machine can end, as verbs

_STORE_TIMEOUT = timedelta(seconds=60)  # for an answer of the store, as torchrun's
_JOIN_TIMEOUT = 600  # seconds for all machines to come, as torchrun's

# Seconds without an answer of the store, or a beat of a machine, after which that is told, or not waited for.
_GRACE = 15.0

_NEWS_LIMIT = 10.0  # seconds for another machine to tell why its ranks have failed, when ranks here have lost them
_LEAVING_LIMIT = 5.0  # Seconds to leave. On a machine without network that never ends.
_HEARD_LIMIT = 3.0  # seconds for the others to end too, before the store goes that says why this launch has ended
_CONNECT_LIMIT = 2.0  # seconds of one attempt to connect, for which a wait that was given up is waited for
_RETRY_INTERVAL = 0.2  # seconds between two attempts to connect
_CHECK_INTERVAL = 0.5  # seconds between two checks of the store
_WAIT_INTERVAL = 0.05  # seconds between two checks whether a wait is to end


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
        own_address: str,
        listener: socket.socket | None,
        *,
        num_processes: int,
        check: Callable[[], object],
    ) -> None:
        self._seconds = int((options.rdzv_conf or {}).get("join_timeout", _JOIN_TIMEOUT))
        self._endpoint, self._check_goes_on = endpoint, check
        self._where = "{}:{}".format(*endpoint)
        self._name = f"nb_accelerate {options.rdzv_id}"
        self._kind = f"{options.num_nodes} machines with num_processes={num_processes}"
        self._me = f"{own_address} ({socket.gethostname()}, process {os.getpid()})"
        self._is_first = listener is not None
        self._node_ranks = range(options.num_nodes)
        # Those that this machine takes, the first that is free. The machine with the store has rank 0 if it can.
        self._wanted_node_ranks = (*self._node_ranks[0 if self._is_first else 1 :], 0)
        if options.rdzv_backend == "static":
            self._wanted_node_ranks = (options.node_rank,)
        self._is_given_up = False
        self._is_over = True  # until `watch`
        self._store: Any = None
        self._round = self._node_rank = -1
        self._other_machines: dict[int, str] = {}
        try:
            self._in_thread(functools.partial(self._connect, listener))
        except BaseException:
            if listener is not None:
                listener.close()
            self._store = None
            raise

    def meet(self) -> tuple[int, str]:
        """Wait for the machines. Return the number of this one, and a name for this round."""
        self._in_thread(self._meet)
        return self._node_rank, f"{self._name} {self._round}"

    def close(self, ended: str) -> None:
        """Leave the launch, which nobody can then take part in."""
        leaving = HelperThread(self._leave, ended, name="leaving")
        leaving.start()
        try:
            leaving.join(_LEAVING_LIMIT)
        finally:
            self._store = None

    # While ranks run: called by the launch, in the thread of its loop.

    def watch(self, request: Request) -> None:
        """Watch the other machines until `close_watch`, and abandon the request when ranks there have failed."""
        self._request = request
        self._news: MachineError | None = None
        self._unreachable: MachineError | None = None
        self._reason = ""
        self._is_over = self._is_watch_closed = False
        self._beats: dict[str, tuple[int, float]] = {}
        self._silent: set[str] = set()
        self._wake = threading.Event()
        self._thread = HelperThread(self._run, name="machines", on_failure=self._lost_store)
        self._thread.start()

    def check(self) -> None:
        """Tell the others of a failure here, abandon the request because of one there, or say who is silent."""
        if self._is_over or self._request.done.is_set() or self._tells_own_cause():
            return
        if self._news is not None:
            self._is_over = True
            self._request.abandon(self._news)
            return
        late = time.monotonic() - _GRACE
        silent = {machine for machine, (_, heard) in [*self._beats.items()] if heard < late and self._thread.is_alive()}
        for machine in silent - self._silent:
            self._request.say(
                f"nothing has been heard of the machine at {machine} for {_GRACE:g} s: it is down, or without network. "
                "Ranks that wait for those there go on when it is back"
            )
        self._silent = silent

    def explain(self, error: BaseException | None) -> BaseException | None:
        """Return why the request has failed: the reason of another machine if ranks here only know that they lost it.

        If the reason is here, the others are told. `error` is what the ranks here say; None if they have not failed.
        """
        if self._is_over or self._tells_own_cause() or error is None or not self._request.incidents:
            return error
        # The thread looks every half second: why another machine has failed may be in the store, and not yet read.
        deadline = time.monotonic() + _NEWS_LIMIT
        while self._thread.is_alive() and self._news is None and time.monotonic() < deadline:
            self._thread.join(_WAIT_INTERVAL)
        launches = "the launch on the machine" if len(self._other_machines) == 1 else "a launch on one of the machines"
        addresses = [*self._other_machines.values()]
        return (
            self._news
            or self._unreachable
            or MachineError(
                f"{launches} at {', '.join(addresses)} was killed, or that machine is down or without network: ranks "
                "have lost others, and no machine has told why",
                address=addresses[0].split()[0],
            )
        )

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
        if cause.kind is not IncidentKind.INTERRUPTED:  # `close` tells the others of an interrupt
            self._reason = said_of(cause, self._request)
            self._wake.set()
        return True

    # In helper threads, because the store may never answer.

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_watch_closed  # before the check, which tells what was to be told
            self._exchange_beats()
            if self._reason:
                self._fail(f"on the machine at {self._me}, {self._reason}")
            is_new_round = int(self._store.get("round")) > self._round
            if self._store.check([f"{self._round}/failed"]):  # after it: who begins a round may have failed in this one
                machine, why = json.loads(self._store.get(f"{self._round}/failed"))
                if machine != self._me:
                    self._news = self._news or MachineError(why, address=machine.split()[0])
            elif is_new_round:
                self._news = self._news or MachineError("another machine has started again", address=self._endpoint[0])
            self._wake.wait(0 if is_last else _CHECK_INTERVAL)
            self._wake.clear()

    def _exchange_beats(self) -> None:
        """Say that this machine is there, and note when others have said so: the first of all, all of the first."""
        self._store.add(f"{self._round}/{self._node_rank}/beats", 1)
        now = time.monotonic()
        for number, machine in self._other_machines.items() if self._is_first else ():
            beats = self._store.add(f"{self._round}/{number}/beats", 0)
            if beats != self._beats.get(machine, (-1, now))[0] or self._store.check([f"ended/{number}"]):
                self._beats[machine] = beats, now
        if not self._is_first:
            self._beats[self._where] = 0, now

    def _lost_store(self, _: str, error: BaseException) -> None:
        """Keep why nothing is heard any more. Ranks that do not need the first machine go on."""
        if not self._is_watch_closed:  # or it has waited for a machine without network until now
            why = str(error).split("\n", maxsplit=1)[0]
            self._unreachable = MachineError(
                f"the launch on the machine at {self._where} has ended or was killed, or that machine is down or "
                f"without network ({type(error).__name__}: {why})",
                address=self._endpoint[0],
            )

    def _fail(self, why: str) -> None:
        """Tell the others why ranks of this machine have failed. The first reason of all machines counts."""
        self._store.compare_set(f"{self._round}/failed", "", json.dumps([self._me, why]))

    def _leave(self, ended: str) -> None:
        with contextlib.suppress(RuntimeError):  # the first machine has gone, and its store with it
            if not self._other_machines:  # it has only waited: others may come in its place
                for key in (f"{self._round}/{self._node_rank}", f"{self._round}/{self._node_rank}/there"):
                    self._store.delete_key(key)
                return
            if ended != DONE:
                self._fail(f"the launch on the machine at {self._me} {ended}")
            self._store.set("closed", "")
            self._store.set(f"ended/{self._node_rank}", "")
            until = time.monotonic() + _HEARD_LIMIT
            while self._is_first and time.monotonic() < until:
                if self._store.check([f"ended/{number}" for number in self._node_ranks]):
                    break
                time.sleep(_WAIT_INTERVAL)

    def _in_thread(self, action: Callable[[], object]) -> None:
        """Run what asks the store. Interrupts, and what `check` raises, end the wait."""
        errors: list[BaseException] = []

        def act() -> None:
            importlib.import_module("torch.distributed")  # takes its time, which does not count
            self._until = time.monotonic() + self._seconds
            action()

        self._until = math.inf
        thread = HelperThread(act, name="rendezvous", on_failure=lambda _, error: errors.append(error))
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_WAIT_INTERVAL)
                self._check_goes_on()
                if time.monotonic() > self._until + _GRACE:
                    raise self._no_first_machine(TimeoutError("it has no network"))
        except BaseException:
            self._is_given_up = True
            thread.join(_CONNECT_LIMIT)
            raise
        try:
            if errors:
                raise errors[0]
        except LaunchError:  # the first machine has answered
            raise
        except (OSError, RuntimeError) as error:
            raise self._no_first_machine(error) from None
        finally:
            errors.clear()  # or the error would keep itself, and torch's store, until garbage is collected

    def _no_first_machine(self, error: BaseException) -> StartError:
        why = getattr(error, "strerror", None) or str(error).split("\n", maxsplit=1)[0]
        return StartError(
            f"the first machine, {self._where}, did not answer within {self._seconds} s ({why}). Start the same launch "
            f"there, and see that nothing blocks that port"
        )

    def _connect(self, listener: socket.socket | None) -> None:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

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
                self._store = PrefixStore(self._name, store)
                if not self._store.check(["closed"]):
                    break
                raise ConnectionError("a launch that has ended is still there")  # the launch of the cell before, say
            except (OSError, RuntimeError):
                self._store = None
                if self._is_first or self._is_given_up or time.monotonic() > self._until:
                    raise
            time.sleep(_RETRY_INTERVAL)  # nothing tells when somebody begins to listen there
        if self._is_first:
            self._store.set("round", "0")
            self._store.set("kind", self._kind)  # for which the others wait
        kind = self._store.get("kind").decode()
        if kind != self._kind:
            raise ConfigError(
                f"this machine was started for {self._kind}, but the launch at {self._where} for {kind}. Start the "
                "same launch, with the same numbers, on all machines"
            )

    def _meet(self) -> None:
        """Take a number in the newest round, and wait until all are taken; begin another round where none is free."""
        if self._other_machines:
            self._begin_round_after(self._round)
        self._other_machines = {}
        while True:
            self._round = int(self._store.get("round"))
            wanted, store = self._wanted_node_ranks, self._store
            taken = (n for n in wanted if store.compare_set(f"{self._round}/{n}", "", self._me).decode() == self._me)
            self._node_rank = next(taken, -1)
            if self._node_rank < 0:  # the number is that of a launch that was killed, say
                self._begin_round_after(self._round)
            elif self._all_have_come():
                return

    def _begin_round_after(self, number: int) -> None:
        """Begin another round, unless somebody has: all machines then meet again."""
        self._store.compare_set("round", str(number), str(number + 1))

    def _all_have_come(self) -> bool:
        """Wait for all machines of this round. Return False if another one has begun meanwhile."""
        keys = [f"{self._round}/{number}" for number in self._node_ranks]
        marks, limit = [f"{key}/there" for key in keys], math.inf
        while not self._is_given_up:
            if self._store.check(keys):  # each says again that it is there: it may have been killed while it waited
                self._store.set(marks[self._node_rank], "")
                limit = min(limit, time.monotonic() + _GRACE)
            has_ended = self._store.check(["closed"])  # first: who sees all earlier may have run its ranks to their end
            # Before the next round: another machine may have met all in this one, and have begun again since. If this
            # one went there at once, its number of attempts would stay behind that of the others.
            if self._store.check(marks):
                machines = enumerate(self._store.get(key).decode() for key in keys)
                self._other_machines = {number: machine for number, machine in machines if number != self._node_rank}
                return True
            if int(self._store.get("round")) > self._round:
                return False
            if has_ended:
                raise StartError("the launch has ended on another machine: nobody can take part in it any more")
            if time.monotonic() > limit:
                self._begin_round_after(self._round)
            elif time.monotonic() > self._until:
                raise StartError(self._who_is_missing(keys, keys if limit == math.inf else marks))
            time.sleep(_WAIT_INTERVAL)
        raise TimeoutError("nobody waits any more")

    def _who_is_missing(self, keys: list[str], marks: list[str]) -> str:
        here = [key for key, mark in zip(keys, marks, strict=True) if self._store.check([mark])]
        who = f"here is {', '.join(self._store.get(key).decode() for key in here)}"
        if len(self._wanted_node_ranks) == 1:
            missing = [str(number) for number, key in zip(self._node_ranks, keys, strict=True) if key not in here]
            who = f"number {', '.join(missing)} is missing"
        return (
            f"{len(here)} of {len(keys)} machines came to {self._where} within {self._seconds} s; {who}. Start the "
            "same launch on each of them"
        )
