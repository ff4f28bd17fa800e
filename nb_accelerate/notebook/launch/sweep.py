"""A sweep: one run of a function for each configuration, as many at a time as there are ranks.

::

    configurations --> the next free place (a GPU, or a share of the cores) --> a new process --> call --> its end
                            ^                                                                                 |
                            +----- the place is free again <----- value or exception, by index <--------------+

Each run has a process of its own, alone in its world: it begins with the same random numbers as the others, a device is
empty when it comes, and one that is killed costs nothing but itself. All of it happens in the thread that waits.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.records import Curve
from nb_accelerate.base.records.kept import note_run
from nb_accelerate.base.records.record import is_training_loss
from nb_accelerate.errors import DeadlineError
from nb_accelerate.notebook.display.frontend import is_in_kernel
from nb_accelerate.notebook.display.logged_values import LoggedValues, ThinnedCurve
from nb_accelerate.notebook.display.panel import Action, PanelSource
from nb_accelerate.notebook.display.run_rows import RunStatus
from nb_accelerate.notebook.launch.configurations import names_of
from nb_accelerate.notebook.launch.description import facts_of, simple_arguments
from nb_accelerate.notebook.launch.launch import WORDING, Launch
from nb_accelerate.notebook.launch.local import LocalRank
from nb_accelerate.notebook.launch.rendezvous import open_rendezvous
from nb_accelerate.notebook.launch.servers import one_at_a_time
from nb_accelerate.notebook.launch.setup import make_setup, pack_notebook
from nb_accelerate.notebook.launch.starters import open_server
from nb_accelerate.notebook.launch.values import Values, pack_call, unpack_values
from nb_accelerate.notebook.protocol.messages import Call
from nb_accelerate.notebook.ranks.end_reports import end_reports
from nb_accelerate.notebook.ranks.failing.errors import error_of, interrupted, said_of, summary
from nb_accelerate.notebook.ranks.failing.incidents import INTERRUPTED, first_cause
from nb_accelerate.notebook.ranks.failing.outcome import outcome_of
from nb_accelerate.notebook.ranks.failing.same_failure import one_line
from nb_accelerate.notebook.ranks.loop import RankLoop
from nb_accelerate.notebook.ranks.output.request_output import RequestOutput
from nb_accelerate.notebook.ranks.proxy import RankProxy
from nb_accelerate.notebook.ranks.request import Awaits, Request
from nb_accelerate.notebook.ranks.request_panel import RequestView, make_panel
from nb_accelerate.notebook.ranks.status import RankStatus, state_of
from nb_accelerate.notebook.ranks.steps import StepKind, call_steps, quit_steps
from nb_accelerate.notebook.ranks.waiting import interrupts_call
from nb_accelerate.notebook.worker.server.limits import enough_room

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.display.frontend import FrontEnd
    from nb_accelerate.notebook.display.panel import Panel
    from nb_accelerate.notebook.display.view import PanelStatus
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.protocol.shipping import Packed
    from nb_accelerate.notebook.ranks.output.sinks import Sink


@dataclass(eq=False, kw_only=True)
class _Run:
    """A run that has a process, whose rank number is the index of the run."""

    place: int
    options: LaunchOptions
    rank: RankProxy
    calling: Request
    view: RequestView
    resources: contextlib.ExitStack
    leaving: Request | None = None
    began: float = field(default_factory=time.time)
    losses: ThinnedCurve = field(default_factory=ThinnedCurve)
    logged: LoggedValues = field(default_factory=LoggedValues)

    @property
    def index(self) -> int:
        return self.rank.rank

    @property
    def has_news(self) -> bool:
        """Whether it has answered, or its process has ended after that."""
        return (self.leaving or self.calling).done.is_set()

    def look(self) -> RunStatus:
        """Return what is seen of it now."""
        status = self.view.statuses()[0]
        sample = status.sample
        loss = next((value for name, value in sample.scalars.items() if is_training_loss(name)), sample.loss)
        if loss is not None:
            self.losses.add(sample.steps, loss)
        self.logged.add(sample, sample.steps)
        return RunStatus(rank=self.index, sample=sample, state=status.state, pid=status.pid)

    def record(self, name: str, ended: str) -> None:
        """Note it for `nb_accelerate.runs`."""
        curves = (Curve("loss", self.losses.points), *self.logged.curves)
        note_run(
            name,
            config=simple_arguments(self.options),
            values={curve.name: curve.points for curve in curves if curve.points},
            began=self.began,
            ended=ended,
            logged_as=[*self.rank.output.logged],
        )


class Sweep(Launch):
    """Runs of a function with one configuration each; what ``notebook_launcher(..., sweep=..., block=False)`` returns.

    It is a `Launch` whose values are those of the runs, in the order of the configurations, and whose ranks are the
    runs that are on, by their index. Training in them is not steered together.
    """

    def __init__(
        self,
        runs: Sequence[Mapping[str, Any]],
        options: LaunchOptions,
        plan: LaunchPlan,
        sink: Sink,
        front_end: FrontEnd = "off",
        display_id: str = "",
    ) -> None:
        super().__init__(options, plan, sink, front_end, display_id)
        self._runs = runs
        self._names = names_of(runs)
        self._waiting = deque(range(len(runs)))
        self._running: list[_Run] = []
        self._values_of: dict[int, Any] = {}
        self._failures: dict[int, BaseException] = {}
        self._source = _SweepSource(self._running, (Action("Interrupt", "end all runs", self.interrupt),))
        self._panel_of_runs: Panel | None = None
        self._texts: dict[int, RankProxy] = {}

    @property
    @override
    def ranks(self) -> list[RankStatus]:
        """The runs that are on; the rank is the index of a run."""
        return [
            RankStatus(rank=run.index, pid=run.rank.handle.pid, state=state_of(run.rank, run.calling))
            for run in tuple(self._running)
        ]

    @override
    def output(self, rank: int) -> str:
        """Return the last thousand lines that a run has printed, by its index; "" if it has not begun."""
        if not 0 <= rank < len(self._runs):
            raise LookupError(f"rank={rank!r}: this sweep has runs 0 to {len(self._runs) - 1}")
        return self._texts[rank].output.text if rank in self._texts else ""

    @override
    def _attempts(self) -> Values:
        options, plan = self._options, self._plan
        with contextlib.ExitStack() as stack:
            with enough_room():
                # Once, before anything runs: meanwhile the notebook may change what the function uses.
                packed = pack_call(options, self._name, can_fork=plan.can_fork, sweep=self._runs)
                call = stack.enter_context(packed) if not plan.method.copies_notebook else None
                notebook = stack.enter_context(pack_notebook())
            stack.enter_context(interrupts_call(self._interrupt_requests))
            with enough_room():
                loop = RankLoop(monitor_interval=options.monitor_interval)
                stack.callback(loop.close)
            loop.output = output = RequestOutput(
                range(len(self._runs)),
                self._sink,
                style="raw",
                prefix=lambda ranks: f"[{self._names[ranks[0]]}] ",
            )
            self._loop = loop
            stack.callback(self._close_runs)
            try:
                self._start_next(loop, call, notebook)
                with output.guard:
                    self._show_panel(output)
                self._has_panel.set()
                while self._running:
                    loop.run_until(lambda: any(run.has_news for run in self._running))
                    for run in [run for run in self._running if run.has_news]:
                        self._go_on(loop, run)
                    self._start_next(loop, call, notebook)
                output.finish()
                return self._outcome(output)
            except BaseException as error:
                self._finish_panel(output, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
                raise
            finally:
                self._finish_panel(output, "done")

    # Runs.

    def _start_next(self, loop: RankLoop, call: Packed | None, notebook: Packed) -> None:
        """Start runs in all places that are free, unless the sweep is to end."""
        free = {*range(self._plan.num_processes)} - {run.place for run in self._running}
        while self._waiting and free and not self._stopped:
            index = self._waiting.popleft()
            if self._is_late:
                late = WORDING.limit.format(seconds=self._options.timeout)
                text = f"the sweep took longer than {late}, and {self._title(index)} was not started"
                self._failures[index] = DeadlineError(text, stacks={})
                continue
            place = min(free)
            try:
                with enough_room():
                    self._start(loop, index, place, call, notebook)
            except Exception as error:  # there is no room for a process, say; it may come later
                self._failures[index] = error
            else:
                free.discard(place)

    @property
    def _is_late(self) -> bool:
        limit = self._options.timeout
        return limit is not None and time.monotonic() > self._began + limit

    def _start(self, loop: RankLoop, index: int, place: int, call: Packed | None, notebook: Packed) -> None:
        kwargs = {**self._options.kwargs, **self._runs[index]}
        options = replace(self._options, num_processes=1, use_port=None, kwargs=kwargs)
        plan = self._plan.of_run(place)
        with contextlib.ExitStack() as undo:
            with one_at_a_time(), end_reports() as ends:
                server = undo.enter_context(open_server(plan.method, options))
                rendezvous = undo.enter_context(open_rendezvous(options, plan))
                store, store_fd = rendezvous.store_for(0)
                handle = LocalRank(index, ends=ends, store=store, store_fd=store_fd)
                undo.callback(handle.close)
                handle.page.want_rows(self._front_end != "off")
                server.start([handle])
            rank = self._texts[index] = RankProxy(handle)
            loop.add(rank)

            def send(_: RankProxy) -> None:
                setup = make_setup(handle, options, plan, rendezvous, notebook.parcel, store=store)
                with contextlib.suppress(OSError):  # it has ended already, which its status tells
                    handle.send(setup, notebook.fds)
                    if call is None:
                        handle.ask(Call(parcel=None))
                    else:
                        handle.ask(Call(parcel=call.parcel, index=index), call.fds)

            calling = self._request(
                rank,
                send=send,
                steps=call_steps(self.timeouts),
                start=self.timeouts.start,
                timeout=options.timeout,
                spent=time.monotonic() - self._began,
                on_host=plan.kind.is_host,
                attended=False,
            )
            run = _Run(
                place=place,
                options=options,
                rank=rank,
                calling=calling,
                view=RequestView(calling, ()),
                resources=undo.pop_all(),
            )
        self._running.append(run)
        loop.begin(calling)

    def _request(self, rank: RankProxy, **options: Any) -> Request:
        return Request(
            ranks=[rank],
            wording=replace(WORDING, what="the sweep", run=self._title(rank.rank)),
            say=self._say,
            panel=self._panel_of_runs,
            keeps_panel=True,
            **options,
        )

    def _go_on(self, loop: RankLoop, run: _Run) -> None:
        """Have the process of a run that has answered end; when that is done, note the value, and free the place."""
        timeouts = self.timeouts
        if run.leaving is None:
            seconds = timeouts.quit if run.calling.step is None else timeouts.unwind
            steps = quit_steps(timeouts, seconds=seconds)
            run.leaving = self._request(run.rank, send=RankProxy.quit, steps=steps, awaits=Awaits.END)
            loop.begin(run.leaving)
            return
        error = error_of(run.calling, run.leaving)
        if error is None:
            try:
                self._values_of[run.index] = unpack_values(run.calling)[0]
            except Exception as of_value:
                error = of_value
        outcome, failure = outcome_of(run.calling, run.leaving, error=error)
        causes = [*run.calling.incidents, *run.leaving.incidents]
        cause = first_cause(causes) if causes else None
        why = failure.what if failure is not None else ""
        if cause is not None and cause.failure is not None and why == cause.failure[0].report.type_name:
            why = one_line(cause.failure[0].report)
        self._source.note_end(run, outcome, why)
        run.record(self._name, f"{outcome}: {failure.what}" if failure is not None and failure.what else outcome)
        if error is not None:
            self._failures[run.index] = error
            others = self._waiting or len(self._running) > 1
            if self._front_end != "widget" and not self._stopped and others:  # which is known at the end otherwise
                said = said_of(cause, run.calling) if cause is not None else summary(error)
                self._say(f"{said.removesuffix('.')}; the other runs go on")
        self._close(loop, run)

    def _close(self, loop: RankLoop, run: _Run) -> None:
        self._running.remove(run)
        run.calling.close()
        loop.remove(run.rank)
        run.resources.close()

    def _close_runs(self) -> None:
        """Kill what still runs, if the sweep itself has failed."""
        for run in tuple(self._running):
            run.rank.handle.kill()
            if self._loop is not None:
                self._close(self._loop, run)

    def _title(self, index: int) -> str:
        return f"sweep[{index}] ({self._names[index]})"

    # The whole.

    @override
    def _interrupt_requests(self, kind: StepKind = StepKind.INTERRUPT, how: str = INTERRUPTED) -> None:
        self._stopped = self._stopped or how
        for run in tuple(self._running):
            requests = (run.calling,) if run.leaving is None else (run.calling, run.leaving)
            if self._loop is not None:
                self._loop.interrupt(*requests, kind=kind, how=how)

    def _outcome(self, output: RequestOutput) -> Values:
        """Return the values of all runs, or raise the first error with what all have returned or raised."""
        number = len(self._runs)
        values = Values(
            self._values_of[index] if index in self._values_of else self._failures.get(index, CancelledError())
            for index in range(number)
        )
        returned = f"{len(self._values_of)} of {number} runs have returned"
        if self._stopped and len(self._values_of) < number:
            error: BaseException = interrupted(f"the sweep was {self._stopped}")
        elif self._failures:
            error = self._failures[min(self._failures)]
        else:
            return values
        with contextlib.suppress(AttributeError):  # a type with slots
            error.results = list(values)  # type: ignore[attr-defined]
        in_kernel = "import sys; results = sys.last_value.results, before another error takes its place"
        where = in_kernel if is_in_kernel() else "error.results of the exception"
        output.note(f"{returned}. Their values, in order, beside the exceptions of the others: {where}")
        raise error

    def _show_panel(self, output: RequestOutput) -> None:
        facts = replace(facts_of(self._name, self._plan), runs=tuple(self._names))
        numbers = range(len(self._runs))
        panel = make_panel(facts, numbers, self._sink, self._source, self._front_end, self._display_id)
        self._panel_of_runs = output.panel = panel
        for run in self._running:
            run.calling.panel = panel

    def _finish_panel(self, output: RequestOutput, state: PanelStatus) -> None:
        if self._panel_of_runs is not None:
            with output.guard:
                self._panel_of_runs.finish(state)


class _SweepSource(PanelSource):
    """The runs of a sweep, for its panel: those that are on, and those that have ended as they were then."""

    has_asides = False

    def __init__(self, running: Sequence[_Run], actions: Sequence[Action]) -> None:
        self._running = running
        self._actions = actions
        self._seen: dict[int, RunStatus] = {}

    def note_end(self, run: _Run, outcome: PanelStatus, failure: str) -> None:
        """Note how a run has ended, whose process is gone."""
        self._seen[run.index] = replace(run.look(), pid=None, outcome=outcome, failure=failure)

    @override
    def statuses(self) -> list[RunStatus]:
        for run in self._running:
            self._seen[run.index] = run.look()
        return [*self._seen.values()]

    @override
    def ask(self) -> None:
        pass

    @override
    def note_lines(self) -> None:
        pass

    @override
    def stacks(self) -> Mapping[int, str]:
        return {}

    @override
    def runs(self) -> Sequence[str]:
        return ()

    @override
    def log(self, rank: int) -> str:
        return ""

    @override
    def actions(self) -> Sequence[Action]:
        return self._actions
