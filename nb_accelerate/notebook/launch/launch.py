"""A launch: one attempt or several to run a function on ranks, and the handle of a launch in the background."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from nb_accelerate.base import words
from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.errors import (
    ConfigError,
    DeadlineError,
    MissingDependencyError,
    NotPreparedError,
    ShippingError,
    StartError,
    UnknownArgumentError,
)
from nb_accelerate.notebook.display.panel import Action
from nb_accelerate.notebook.launch.description import facts_of, line_prefix, simple_arguments
from nb_accelerate.notebook.launch.placing import PlacingHere
from nb_accelerate.notebook.launch.setup import pack_notebook
from nb_accelerate.notebook.launch.values import keep_values, note_of_dropped, pack_call, unpack_values
from nb_accelerate.notebook.protocol.interrupts import interrupts_later
from nb_accelerate.notebook.protocol.messages import Call
from nb_accelerate.notebook.ranks.failing.errors import error_of, interrupted, outcome_of, summary
from nb_accelerate.notebook.ranks.failing.incidents import INTERRUPTED, STOPPED, Wording
from nb_accelerate.notebook.ranks.loop import RankLoop
from nb_accelerate.notebook.ranks.output.guard import OutputGuard
from nb_accelerate.notebook.ranks.output.request_output import RequestOutput
from nb_accelerate.notebook.ranks.proxy import RankProxy
from nb_accelerate.notebook.ranks.request import Awaits, Request
from nb_accelerate.notebook.ranks.request_panel import RequestView, make_panel
from nb_accelerate.notebook.ranks.status import RankStatus, state_of
from nb_accelerate.notebook.ranks.steerable import Steerable, steering_actions
from nb_accelerate.notebook.ranks.steps import StepKind, call_steps, quit_steps
from nb_accelerate.notebook.ranks.timeouts import Timeouts
from nb_accelerate.notebook.ranks.waiting import goes_on_if_interrupted, interrupts_call, wait
from nb_accelerate.notebook.worker.server.limits import explain_resource_errors

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from types import TracebackType

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.display.frontend import FrontEnd
    from nb_accelerate.notebook.display.panel import Panel
    from nb_accelerate.notebook.launch.placing import Placing
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.launch.rendezvous import Meet
    from nb_accelerate.notebook.launch.rendezvous_store import Machines
    from nb_accelerate.notebook.launch.values import Values
    from nb_accelerate.notebook.protocol.shipping import Packed
    from nb_accelerate.notebook.ranks.handle import RankHandle
    from nb_accelerate.notebook.ranks.output.sinks import Sink


# Seconds that a launch in the background is waited for, at most, until it has its panel. It takes some milliseconds, or
# for ever where other machines have to come first.
_PANEL_TIMEOUT = 1.0

# Errors of what is written in the program. They come back in every attempt, so `max_restarts` is not for them.
_NOT_RESTARTED = (ConfigError, MissingDependencyError, NotPreparedError, ShippingError, UnknownArgumentError)


class Launch(Steerable):
    """Ranks that run a function in the background; what ``notebook_launcher(..., block=False)`` returns.

    Several may run at once. What the ranks print is shown in the cell that launched them. In a coroutine,
    ``await launch`` returns the values.

    Examples:
        ```python
        launch = notebook_launcher(train, num_processes=2, block=False)
        launch.save_checkpoint()
        launch.stop_after_epoch()
        launch.result()
        ```
    """

    timeouts: ClassVar[Timeouts] = Timeouts()  # timeouts of launches that begin from now on

    def __init__(
        self,
        options: LaunchOptions,
        plan: LaunchPlan,
        sink: Sink,
        front_end: FrontEnd = "off",
        display_id: str = "",
        *,
        name: str = "",
        exit_returns: bool = False,
        placing: Placing | None = None,
    ) -> None:
        self._options = options
        self._plan = plan
        self._placing = placing
        self._sink = sink
        self._front_end = front_end
        self._display_id = display_id
        name = name or str(getattr(options.function, "__qualname__", type(options.function).__name__))
        self._name = "".join(letter if letter.isprintable() else " " for letter in name)  # it is shown in terminals
        self._exit_returns = exit_returns
        self._began = time.monotonic()
        self._seconds: float | None = None
        self._loop: RankLoop | None = None
        self._requests: tuple[Request, ...] = ()
        self._machines: Machines | None = None
        self._values: Values | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._stopped = ""  # how, in a word
        self._is_waited_for = True
        self._has_panel = threading.Event()  # or has ended without one
        self._done = threading.Event()
        self._done_for_coroutines: Future[None] = Future()
        self._done_for_coroutines.set_running_or_notify_cancel()  # a coroutine that is cancelled does not cancel it
        self._lock = threading.Lock()

    # Called by the user's code.

    @property
    def ranks(self) -> list[RankStatus]:
        """The ranks that this notebook has started, here or on the machines of an engine."""
        return [
            RankStatus(
                rank=rank.rank,
                machine=rank.handle.machine,
                pid=rank.handle.pid,
                state=state_of(rank, request),
                exitcode=rank.handle.exitcode,
            )
            for request in self._requests[:1]
            for rank in request.ranks
        ]

    def status(self) -> str:
        """Return what the panel says: ``"starting"``, ``"running"`` or how the launch ended.

        That is ``"done"``, ``"failed"``, ``"interrupted"``, or ``"stopped"`` by `stop`.
        """
        if not self._done.is_set():
            return "running" if any(rank.state != "starting" for rank in self.ranks) else "starting"
        if self._error is None:
            return "done"
        if isinstance(self._error, KeyboardInterrupt) and (self._stopped or not self._requests):
            return self._stopped or INTERRUPTED
        return outcome_of(*self._requests, error=self._error)[0] if self._requests else "failed"

    def output(self, rank: int) -> str:
        """Return the last thousand lines that a rank has printed, of both streams.

        Raises:
            LookupError: there is no such rank on this machine.
        """
        texts = {proxy.rank: proxy.output.text for request in self._requests[:1] for proxy in request.ranks}
        if rank not in texts:
            raise LookupError(f"rank={rank!r}: this launch has ranks {list(texts)} here")
        return texts[rank]

    @override
    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the launch, at most `timeout` seconds, and return whether it has ended.

        Raises:
            KeyboardInterrupt: the wait was interrupted. The launch goes on.
        """
        with goes_on_if_interrupted(self._name, ends_by=".stop()"):
            return wait(self._done, timeout)

    def result(self, timeout: float | None = None) -> Values:
        """Wait for the end of the launch, and return the values of the ranks.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            TimeoutError: it has not ended within `timeout` seconds. It goes on.
            KeyboardInterrupt: the wait was interrupted. The launch goes on.
            BaseException: what `notebook_launcher` would raise.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"{self._name} has not ended within {timeout} s; it goes on")
        if self._error is not None:
            # With its first traceback, because each time that it is raised frames are added.
            raise BaseException.with_traceback(self._error, self._traceback)
        assert self._values is not None
        return self._values

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every rank, and end the launch. A second time, kill the ranks."""
        self._end(StepKind.INTERRUPT, INTERRUPTED)

    def stop(self) -> None:
        """Send SIGTERM to every rank, and wait until all have ended."""
        self._end(StepKind.TERMINATE, STOPPED)
        wait(self._done)

    @override
    def _steered(self) -> Request | None:
        request = next(iter(self._requests), None)
        if request is not None and request.done.is_set() and not self._done.is_set():
            request = None  # the launch ends, or starts its ranks again
        return request

    def __await__(self) -> Generator[Any, None, Values]:
        """Wait for the values in a coroutine, and return them; see `result`."""
        import asyncio

        yield from asyncio.wrap_future(self._done_for_coroutines).__await__()
        return self.result()

    def __repr__(self) -> str:
        seconds = time.monotonic() - self._began if self._seconds is None else self._seconds
        ranks = words.plural(self._plan.num_processes, "rank")
        why = f": {summary(self._error)}" if self._error is not None else ""
        return f"<Launch of {self._name} on {ranks}: {self.status()} after {words.duration(seconds)}{why}>"

    # Called by `notebook_launcher`.

    def run(self) -> Values:
        """Run it in the calling thread, and return the values of the ranks."""
        self._run()
        return self.result()

    def run_in_background(self) -> None:
        """Run it in a thread of its own. The cell says how it has failed, because nobody may ask for the result."""
        self._is_waited_for = False
        HelperThread(functools.partial(self._run, tell=True), name=self._name).start()
        self._has_panel.wait(_PANEL_TIMEOUT)  # so that `attach` in the next line finds it

    def _run(self, *, tell: bool = False) -> None:
        try:
            self._values = self._attempts()
        except BaseException as error:  # kept for result(), in whichever thread asks for it
            self._error, self._traceback = error, error.__traceback__
            if tell:
                hint = "" if isinstance(error, KeyboardInterrupt) else "; .result() raises it here"
                self._tell(f"{summary(error).removesuffix('.')}{hint}")
        finally:
            self._seconds = time.monotonic() - self._began
            with contextlib.suppress(Exception):
                self._sink.close()
            with self._lock:
                self._done.set()
            self._has_panel.set()
            self._done_for_coroutines.set_result(None)

    def _attempts(self) -> Values:
        options = self._options
        with contextlib.ExitStack() as stack:
            with explain_resource_errors():
                call = self._pack_call(stack)
                placing = self._placing or PlacingHere(options, self._plan)
                stack.callback(placing.close)
            meet = stack.enter_context(placing.repeated_rendezvous(self._check_goes_on))
            attempt = 0
            while True:  # until the values are there, or an error is final
                try:
                    return self._attempt(placing, meet, call, attempt)
                except (KeyboardInterrupt, StartError, DeadlineError):
                    raise
                except BaseException as error:
                    if attempt >= options.max_restarts or self._stopped:
                        raise
                    if isinstance(error, _NOT_RESTARTED):
                        self._tell(f"The ranks are not started again: the same {type(error).__name__} would come back.")
                        raise
                    attempt += 1
                    again = f"start {attempt + 1} of {options.max_restarts + 1}"
                    self._tell(f"{summary(error).removesuffix('.')}; {again}")

    def _pack_call(self, stack: contextlib.ExitStack) -> Packed | None:
        """Pickle the call. Return None where ranks have it in memory: they are forks, or become forks if that fails."""
        plan, is_here = self._plan, self._placing is None
        if is_here and plan.method.copies_notebook:
            return None
        can_fork = is_here and plan.can_fork
        try:
            return stack.enter_context(pack_call(self._options, self._name, can_fork=can_fork))
        except ShippingError as error:
            if not can_fork or error.is_final or self._options.start_method != "auto":
                raise
            self._plan = plan.forked(f"{error.path} cannot be sent")
            line = f"{error.path} cannot be sent to ranks, so they are forks of this process, with one thread each\n"
        if self._front_end != "off":
            with OutputGuard(self._sink):
                self._sink.write(self._sink.own_stream, line)
        return None

    def _tell(self, line: str) -> None:
        with OutputGuard(self._sink):
            self._sink.write("stderr", line + "\n")

    def _check_goes_on(self) -> None:
        """Raise why the launch is to end, while it has no ranks that could be ended."""
        if self._stopped:
            raise interrupted(f"{WORDING.what} was {self._stopped} before its ranks were started")
        limit = self._options.timeout
        if limit is not None and time.monotonic() > self._began + limit:
            late = WORDING.limit.format(seconds=limit)
            raise DeadlineError(f"{WORDING.what} took longer than {late}; its ranks had not been started", stacks={})

    def _attempt(self, placing: Placing, meet: Meet, call: Packed | None, attempt: int) -> Values:
        options, plan, timeouts = self._options, self._plan, self.timeouts
        self._check_goes_on()
        with contextlib.ExitStack() as stack:
            with explain_resource_errors():
                with placing.while_starting():
                    rendezvous = stack.enter_context(meet())
                    wants_rows = self._front_end != "off"
                    handles = stack.enter_context(placing.started_ranks(plan, rendezvous, wants_rows=wants_rows))
                with interrupts_later():  # after the start: forked ranks would inherit the descriptors of the loop
                    check = rendezvous.machines.check if rendezvous.machines is not None else lambda: None
                    loop = RankLoop(monitor_interval=options.monitor_interval, monitor=check)
                    stack.callback(loop.close)
                notebook = stack.enter_context(
                    pack_notebook(
                        is_script=self._exit_returns,
                        inherits=self._placing is None and plan.method.copies_notebook,
                        is_elsewhere=self._placing is not None,
                        modules=placing.by_value,
                    )
                )
                loop.output = self._output_of(handles)
                ranks = [RankProxy(handle) for handle in handles]
                for rank in ranks:
                    loop.add(rank)

            def send(rank: RankProxy) -> None:
                setup = placing.setup_of(rank.handle, plan, rendezvous, notebook.parcel, attempt=attempt)
                with contextlib.suppress(OSError):  # it has ended already, which its status tells
                    rank.handle.send(setup, notebook.fds)
                    rank.handle.ask(Call(parcel=call.parcel if call else None), call.fds if call else ())

            calling = Request(
                ranks=ranks,
                send=send,
                steps=call_steps(timeouts),
                wording=WORDING,
                world_size=plan.world_size,
                start=timeouts.start,
                timeout=options.timeout,
                spent=time.monotonic() - self._began,
                say=loop.output.say,
                hangs=timeouts,
                stuck=functools.partial(placing.check_ways, self._say),
                attended=self._is_waited_for,
                on_host=plan.kind.is_host,
                exit_returns=self._exit_returns,
                keeps_panel=True,
                is_raised=self._is_waited_for and attempt >= options.max_restarts,
            )
            leaving = Request(
                ranks=ranks,
                send=RankProxy.quit,
                steps=quit_steps(timeouts, seconds=timeouts.quit),
                wording=WORDING,
                awaits=Awaits.END,
                world_size=plan.world_size,
                keeps_panel=True,
            )
            with self._lock:
                self._loop, self._requests = loop, (calling, leaving)
                was_stopped = self._stopped
            stack.callback(calling.close)
            if rendezvous.machines is not None:
                self._machines = rendezvous.machines
                self._machines.watch(calling)
                stack.callback(self._machines.close_watch)
            return self._carry_out(loop, calling, leaving, is_first=not attempt, was_stopped=was_stopped)

    def _carry_out(
        self, loop: RankLoop, calling: Request, leaving: Request, *, is_first: bool, was_stopped: str
    ) -> Values:
        """Have the ranks answer the call and leave. Return their values, or raise the first cause of a failure."""
        timeouts, output = self.timeouts, loop.output
        assert output is not None

        def finish_panel(error: BaseException | None = None) -> None:
            if calling.panel is not None:
                with output.guard:
                    calling.panel.finish(*outcome_of(calling, leaving, error=error))

        try:
            with interrupts_call(self._interrupt_requests):
                loop.begin(calling)
                if was_stopped:
                    self._interrupt_requests(StepKind.TERMINATE, was_stopped)
                with output.guard:  # after the request, so that the ranks start meanwhile
                    calling.panel = output.panel = self._panel(calling, is_first=is_first)
                self._has_panel.set()
                loop.run(calling)
                if calling.step is not None:  # not all ranks have finished by themselves
                    leaving.steps = quit_steps(timeouts, seconds=timeouts.unwind)
                leaving.panel = calling.panel
                loop.begin(leaving)
                loop.run(leaving)
                if note := note_of_dropped(calling, self._name):
                    output.note(note)
                output.finish()
            error = error_of(calling, leaving)
            if self._machines is not None:
                error = self._machines.explain(error)
            if error is not None:
                keep_values(error, calling)
                raise error
            values = unpack_values(calling)
        except BaseException as error:
            finish_panel(error)
            raise
        finish_panel()
        return values

    def _end(self, kind: StepKind, how: str) -> None:
        with self._lock:  # ranks that are just started see that the launch is to end, or are ended here
            self._stopped = how
            self._interrupt_requests(kind, how)

    def _interrupt_requests(self, kind: StepKind = StepKind.INTERRUPT, how: str = INTERRUPTED) -> None:
        if self._loop is not None and not self._done.is_set():
            self._loop.interrupt(*self._requests, kind=kind, how=how)

    def _panel(self, request: Request, *, is_first: bool) -> Panel | None:
        config = {} if self._exit_returns else simple_arguments(self._options)  # a script has none
        facts = facts_of(self._name, self._plan, config)
        actions = (
            Action("Interrupt", "raise KeyboardInterrupt in every rank", self.interrupt),
            *steering_actions(request, self._note),
        )
        numbers = [rank.rank for rank in request.ranks]
        display_id = self._display_id if is_first else ""
        return make_panel(facts, numbers, self._sink, RequestView(request, actions), self._front_end, display_id)

    def _output_of(self, handles: Sequence[RankHandle]) -> RequestOutput:
        options, numbers = self._options, [handle.rank for handle in handles]
        prefix = line_prefix(options.log_line_prefix_template, {handle.rank: handle.local_rank for handle in handles})
        if options.fold_output:
            # Lines that several ranks print alike have a prefix that names them all.
            own = prefix if len(numbers) == 1 else None
            return RequestOutput(numbers, self._sink, hold=self.timeouts.fold, prefix=own)
        return RequestOutput(numbers, self._sink, style="raw", prefix=prefix)

    def _note(self, line: str) -> None:
        loop = self._loop
        if loop is not None:
            loop.post(lambda: loop.output.note(line) if loop.output else None)

    def _say(self, line: str) -> None:
        if self._loop is not None:
            self._loop.say(line)


def _after_end(rank: RankProxy) -> str:
    if rank.handle.exitcode is None:
        return ""
    doing = " while it ran" if rank.is_ready else " while it was being set up"
    return doing if rank.handle.exitcode < 0 else f"{doing}, before the function returned"


WORDING = Wording(what="the launch", owner="launch.Launch", limit="timeout={seconds:g} s", after_end=_after_end)
