"""A launch: its attempts, its ranks, and the handle a notebook holds when it does not wait."""

from __future__ import annotations

import contextlib
import linecache
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ShippingError, StartError
from nb_accelerate.launch.environ import rank_environ, working_directory
from nb_accelerate.launch.local import RankHandle
from nb_accelerate.launch.rendezvous import meet, rendezvous_kind
from nb_accelerate.launch.router import Router
from nb_accelerate.launch.servers import one_at_a_time
from nb_accelerate.launch.starters import open_server
from nb_accelerate.launch.supervisor import Supervisor
from nb_accelerate.launch.values import keep_values, unpack_values
from nb_accelerate.protocol.interrupts import interrupts_later
from nb_accelerate.protocol.messages import Call, Setup
from nb_accelerate.protocol.shipping import pack
from nb_accelerate.ranks.failures import summary
from nb_accelerate.ranks.guard import OutputGuard
from nb_accelerate.ranks.panel import facts_of, make_panel, outcome
from nb_accelerate.worker.limits import enough_room

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from nb_accelerate.config.launch import LaunchOptions
    from nb_accelerate.display.frontend import FrontEnd
    from nb_accelerate.launch.plan import LaunchPlan
    from nb_accelerate.launch.rendezvous import Meeting
    from nb_accelerate.launch.servers import RankServer
    from nb_accelerate.launch.values import Values
    from nb_accelerate.protocol.messages import StoreSpec
    from nb_accelerate.protocol.shipping import Packed
    from nb_accelerate.ranks.sinks import Sink


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """A rank, as it is now.

    Attributes:
        rank: its number.
        pid: its process, or None while it starts.
        state: ``starting``, ``running``, ``returned``, ``failed``, ``stopped`` (SIGSTOP) or ``ended``.
        exitcode: once it has ended: exit code, or minus the signal's number.
    """

    rank: int
    pid: int | None
    state: str
    exitcode: int | None


class Launch:
    """Ranks that run a function in the background; what ``notebook_launcher(..., block=False)`` returns.

    Several may run at once. What the ranks print stays in the cell that launched them. In a coroutine,
    ``await launch`` gives the values.
    """

    def __init__(
        self,
        options: LaunchOptions,
        plan: LaunchPlan,
        sink: Sink,
        front_end: FrontEnd = "off",
        place: str = "",
        *,
        name: str = "",
    ) -> None:
        self._options = options
        self._plan = plan
        self._sink = sink
        self._front_end = front_end
        self._place = place
        self._name = name or getattr(options.function, "__qualname__", type(options.function).__name__)
        self._began = time.monotonic()
        self._seconds: float | None = None
        self._supervisor: Supervisor | None = None
        self._handles: list[RankHandle] = []
        self._router: Router | None = None
        self._values: Values | None = None
        self._error: BaseException | None = None
        self._stopping = False
        self._done = threading.Event()
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    # For whoever holds it.

    @property
    def ranks(self) -> list[RankStatus]:
        """The ranks of this machine."""
        states = self._supervisor.states() if self._supervisor else []
        return [
            RankStatus(rank=handle.rank, pid=handle.pid, state=state, exitcode=handle.exitcode)
            for handle, state in zip(self._handles, states, strict=False)
        ]

    def status(self) -> str:
        """``starting``, ``running``, ``done``, ``failed`` or ``interrupted``."""
        if not self._done.is_set():
            return "running" if any(rank.state != "starting" for rank in self.ranks) else "starting"
        if self._error is None:
            return "done"
        return "interrupted" if isinstance(self._error, KeyboardInterrupt) else "failed"

    def output(self, rank: int) -> str:
        """The last thousand lines a rank printed, both streams.

        Raises:
            LookupError: there is no such rank on this machine.
        """
        for handle, output in zip(self._handles, self._router.outputs if self._router else [], strict=False):
            if handle.rank == rank:
                return output.text
        raise LookupError(f"rank={rank!r}: this launch has ranks {[handle.rank for handle in self._handles]} here")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the launch, at most `timeout` seconds. True if it has ended."""
        return self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> Values:
        """Wait for the end of the launch and give the ranks' values, or raise what `notebook_launcher` would.

        Raises:
            TimeoutError: it has not ended within `timeout` seconds. It goes on.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self._name} has not ended within {timeout} s; it goes on")
        if self._error is not None:
            raise self._error
        assert self._values is not None
        return self._values

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every rank and end the launch; a second time, kill the ranks."""
        self._stopping = True
        with self._lock:
            if self._supervisor is not None and not self._done.is_set():
                self._supervisor.interrupt()

    def stop(self) -> None:
        """Terminate every rank, without asking its code, and wait until it has ended."""
        self._stopping = True
        with self._lock:
            if self._supervisor is not None and not self._done.is_set():
                self._supervisor.stop()
        self._done.wait()

    def __await__(self) -> Generator[Any, None, Values]:
        """The values, once there are some; the event loop goes on meanwhile."""
        import asyncio

        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not ended.done():  # whoever awaited may have been cancelled
                ended.set_result(None)

        def tell() -> None:
            loop.call_soon_threadsafe(resolve)

        with self._lock:
            is_done = self._done.is_set()
            if not is_done:
                self._callbacks.append(tell)
        if not is_done:
            yield from ended.__await__()
        return self.result()

    def __repr__(self) -> str:
        seconds = time.monotonic() - self._began if self._seconds is None else self._seconds
        ranks = f"{self._plan.num_processes} rank{'s' if self._plan.num_processes > 1 else ''}"
        why = f": {summary(self._error)}" if self._error is not None else ""
        return f"<Launch of {self._name} on {ranks}: {self.status()} after {seconds:.1f} s{why}>"

    # For `notebook_launcher`.

    def run(self) -> Values:
        """Run it here, in the calling thread."""
        self._run()
        return self.result()

    def run_in_background(self) -> None:
        """Run it in a thread of its own. Its failure is said in the cell, since nobody may ask for the result."""
        name = f"nb_accelerate-{self._name}"
        threading.Thread(target=self._run, kwargs={"tell": True}, name=name, daemon=True).start()

    def _run(self, *, tell: bool = False) -> None:
        try:
            self._values = self._attempts()
        except BaseException as error:  # kept for result(), in whichever thread asks for it
            self._error = error
            if tell:
                hint = "" if isinstance(error, KeyboardInterrupt) else "; .result() raises it here"
                with OutputGuard(self._sink):
                    self._sink.write("stderr", f"{summary(error)}{hint}\n")
        finally:
            self._seconds = time.monotonic() - self._began
            with contextlib.suppress(Exception):
                self._sink.close()
            with self._lock:
                self._done.set()
                callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()

    def _attempts(self) -> Values:
        options, plan = self._options, self._plan
        with contextlib.ExitStack() as stack:
            with enough_room():
                server = stack.enter_context(open_server(plan.method, options))
                call = None if server.inherits_call else stack.enter_context(self._packed_call())
            attempt = 0
            while True:
                try:
                    return self._attempt(server, call, attempt)
                except (KeyboardInterrupt, StartError):
                    raise
                except BaseException as error:
                    if attempt >= options.max_restarts or self._stopping:
                        raise
                    attempt += 1
                    again = f"{summary(error)}; start {attempt + 1} of {options.max_restarts + 1}"
                    with OutputGuard(self._sink):
                        self._sink.write("stderr", again + "\n")

    def _packed_call(self) -> Packed:
        options = self._options
        call = (options.function, options.args, dict(options.kwargs))
        name = f"the call of {self._name}"
        try:
            return pack(call, name=name, by_value=options.by_value)
        except ShippingError as error:
            text, path = str(error), error.path
            for index, part in enumerate((self._name, "args", "kwargs")):
                text, path = (said.replace(f"{name}[{index}]", part) for said in (text, path))
            if self._plan.can_fork:
                text += " Or write start_method='fork': ranks are then born with it in memory."
            raise ShippingError(text, path=path) from error.__cause__

    def _attempt(self, server: RankServer, call: Packed | None, attempt: int) -> Values:
        options = self._options
        with contextlib.ExitStack() as stack:
            with enough_room():
                births = stack.enter_context(contextlib.ExitStack())
                if rendezvous_kind(options).is_local:
                    births.enter_context(one_at_a_time())
                meeting = stack.enter_context(meet(options, self._plan))
                handles = stack.enter_context(self._started(server, meeting, call, attempt, births))
                template, interval = options.log_line_prefix_template, options.monitor_interval
                router = Router(handles, self._sink, template=template, fold=options.fold_output)
                with interrupts_later():
                    supervisor = Supervisor(
                        handles,
                        router,
                        world_size=self._plan.world_size,
                        timeout=options.timeout,
                        monitor_interval=interval,
                    )
                    stack.callback(supervisor.close)
            with self._lock:
                self._handles, self._router, self._supervisor = handles, router, supervisor
            ranks = [handle.rank for handle in handles]
            facts = facts_of(self._name, self._plan, details=self._plan.describe())
            place = self._place if attempt == 0 else ""
            panel = None
            with router.guard:
                panel = make_panel(facts, ranks, self._sink, supervisor, self._front_end, place=place)
            supervisor.panel = panel
            error: BaseException | None = None
            try:
                if self._stopping:
                    supervisor.stop()
                return unpack_values(supervisor.run())
            except BaseException as caught:
                error = caught
                keep_values(error, supervisor.results())
                raise
            finally:
                with self._lock, router.guard:
                    if panel is not None:
                        panel.finish(*outcome(error))

    @contextlib.contextmanager
    def _started(
        self,
        server: RankServer,
        meeting: Meeting,
        call: Packed | None,
        attempt: int,
        births: contextlib.ExitStack,
    ) -> Iterator[list[RankHandle]]:
        """The ranks, on their way: forked or about to be, and told all they need to know."""
        options, plan = self._options, self._plan
        base = dict(os.environ)
        stores: list[StoreSpec] = []
        handles: list[RankHandle] = []
        with contextlib.ExitStack() as stack:
            if rendezvous_kind(options).holds_sockets:
                stack.callback(server.forget)

            def new_handles() -> Iterator[RankHandle]:
                for local_rank in range(plan.num_processes):
                    rank = plan.topology_of(local_rank, node_rank=meeting.node_rank).rank
                    with interrupts_later():  # or what was just opened would have nobody who closes it
                        store, store_fd = meeting.store_for(local_rank)
                        stores.append(store)
                        handle = RankHandle(rank, local_rank=local_rank, store_fd=store_fd)
                        stack.callback(handle.close)
                        stack.callback(handle.signal, signal.SIGKILL)  # if nobody watches over it when this is left
                    handle.board.want_rows(self._front_end != "off")
                    handles.append(handle)
                    yield handle

            server.start(new_handles())
            births.close()
            sources = stack.enter_context(pack(notebook_sources()))
            for handle, store in zip(handles, stores, strict=True):
                setup = Setup(
                    rank=handle.rank,
                    environ=rank_environ(
                        plan,
                        meeting,
                        handle.local_rank,
                        base=base,
                        extra=options.env,
                        attempt=attempt,
                        max_restarts=options.max_restarts,
                    ),
                    cwd=working_directory(),
                    sys_path=tuple(sys.path),
                    argv=tuple(sys.argv),
                    num_threads=plan.num_threads,
                    sources=sources.parcel,
                    store=store,
                )
                with contextlib.suppress(OSError):  # it has ended already, which its status pipe tells
                    handle.channel.send(setup, sources.fds)
                    handle.ask(Call(parcel=call.parcel if call else None), call.fds if call else ())
            yield handles


def notebook_sources() -> dict[str, str]:
    """Text of everything that was compiled here from no file: the cells that have run, by their file name."""
    return {
        filename: "".join(entry[2])
        for filename, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None
    }
