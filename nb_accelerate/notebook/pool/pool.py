"""A pool: ranks that stay, and run one cell after the other.

One long class, because it is what users hold: each of its methods is something that they can do.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import logging
import os
import sys
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.errors import PoolError, ShippingError
from nb_accelerate.errors.traceback_lines import is_users
from nb_accelerate.notebook.launch.cluster import Cluster
from nb_accelerate.notebook.launch.setup import differences, pack_settings, set_here
from nb_accelerate.notebook.pool.cell import cell_request
from nb_accelerate.notebook.pool.group import RankGroup, breaks_group, result_of
from nb_accelerate.notebook.pool.options import CellOptions, PoolOptions
from nb_accelerate.notebook.pool.packing import SIZE_LIMIT, of_pulled, pack_plan
from nb_accelerate.notebook.pool.plan import plan_cell
from nb_accelerate.notebook.pool.source import read_cell
from nb_accelerate.notebook.pool.variables import RANK_NAMES, SHELL_NAMES, NotebookValue, RankVariables
from nb_accelerate.notebook.protocol.changed_modules import reloaded_here
from nb_accelerate.notebook.protocol.main_module import Globals
from nb_accelerate.notebook.protocol.messages import Call, Result
from nb_accelerate.notebook.protocol.random_states import RandomStates
from nb_accelerate.notebook.protocol.renewal import is_of_torch
from nb_accelerate.notebook.protocol.settings import use_settings
from nb_accelerate.notebook.protocol.shipping import pack
from nb_accelerate.notebook.ranks.output.request_output import RequestOutput
from nb_accelerate.notebook.ranks.output.sinks import sink_here
from nb_accelerate.notebook.ranks.status import RankStatus, locate_ranks, status_of
from nb_accelerate.notebook.ranks.steps import StepKind
from nb_accelerate.notebook.ranks.timeouts import Timeouts
from nb_accelerate.notebook.ranks.waiting import Interrupts, interrupts_call, wait
from nb_accelerate.notebook.worker import namespace as remote
from nb_accelerate.notebook.worker.received import Key, changed_there

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nb_accelerate.notebook.pool.packing import Shipment
    from nb_accelerate.notebook.pool.source import CellSource
    from nb_accelerate.notebook.protocol.settings import Key as SettingKey
    from nb_accelerate.notebook.ranks.output.sinks import Sink
    from nb_accelerate.notebook.ranks.request import Request

_NOTHING = read_cell("")  # a cell that is run for the sake of the names that are sent with it

logger = logging.getLogger("nb_accelerate")


class PoolState(enum.Enum):
    """What a pool is doing. A stop is possible at any time.

    ::

        stopped --start--> starting --> idle <--run--> running
                              ^           |
                              |           +--> disconnected
                              +--restart--+--> broken
    """

    STOPPED = "stopped"
    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    # The ranks live, but their process group is of no use. A new one is made before the next cell.
    DISCONNECTED = "disconnected"
    BROKEN = "broken"  # A rank has ended. The others keep their variables.


# Why ranks take no cell now.
_NOT_READY = {
    PoolState.STOPPED: "no ranks are running. Start some: %distributed start",
    PoolState.STARTING: "the ranks are being started",
    PoolState.RUNNING: "the ranks are running a cell. Wait for it, or interrupt it: %distributed interrupt",
}


class Pool:
    """Ranks that stay, from `start` to `stop`.

    One cell runs at a time. `interrupt` may be called from any thread, the other methods from the notebook's.

    Attributes:
        timeouts: timeouts of requests that begin from now on.
        pending: the options of the last start if it was on other machines and has failed: the next cell tries it again
            and starts no ranks here.
        failed_rank: the rank that failed first in the last cell that failed; None before one has.
    """

    timeouts: ClassVar[Timeouts] = Timeouts(ask=0.2, cause=0.0, interrupt=0.4, quit=5.0, stacks=0.5)

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.options = PoolOptions()  # the options that it was started with
        self._is_starting = False
        self.group: RankGroup | None = None  # the ranks; None if there are none.
        self.variables = RankVariables()  # which variables the ranks have
        self._running: Request | None = None
        self.pending: PoolOptions | None = None
        self.failed_rank: int | None = None
        self._disconnected_silently = False
        self._settings: dict[SettingKey, Any] = {}  # as the ranks have been sent them

    # Its state.

    @property
    def state(self) -> PoolState:
        """What it is doing now."""
        group = self.group
        if group is None:
            return PoolState.STOPPED
        if self._is_starting:
            return PoolState.STARTING
        if self._is_busy:
            return PoolState.RUNNING
        if group.missing:
            return PoolState.BROKEN
        return PoolState.DISCONNECTED if group.is_disconnected else PoolState.IDLE

    @property
    def has_ranks(self) -> bool:
        """Whether there are ranks, or some are being started."""
        return self.group is not None or self._is_starting

    @property
    def is_elsewhere(self) -> bool:
        """Whether its ranks are on machines of an engine."""
        return bool(self.group and self.group.placing.is_elsewhere)

    @property
    def accepts_cells(self) -> bool:
        """Whether no cell runs, so that ranks would answer at once."""
        return self.state not in _NOT_READY

    @property
    def world_size(self) -> int:
        """Number of ranks, with ended ones."""
        return self.group.size if self.group else 0

    def describe(self) -> str:
        """Return one line about the ranks: how many, on what device, how started."""
        return self.group.plan.describe() if self.group else "no ranks"

    @property
    def brief(self) -> str:
        """A few words about the ranks: ``2 processes on CPU``. `describe` says more."""
        return self.group.plan.brief if self.group else "no ranks"

    @property
    def lost(self) -> dict[int, str]:
        """Ranks that have ended, each with a few words about how."""
        group = self.group
        return {} if group is None else {rank: group.how_it_ended(rank) for rank in group.missing}

    # Start and end.

    def start(self, options: PoolOptions | None = None) -> None:
        """Start the ranks, and wait until they have joined a process group.

        Args:
            options: how; None for the defaults.

        Raises:
            PoolError: they run already.
            ConfigError: an option cannot be used on this machine.
            StartError: a rank could not be started.
        """
        options = options or PoolOptions()
        self.pending = None if options.placing.is_local else options
        launch, plan = options.plan()
        self._stop_if_failed()
        if self.has_ranks:
            raise PoolError("ranks run already. To start others, and lose what these have: %distributed stop")
        cluster = None
        if plan is None:  # machines are asked first what they have
            cluster = Cluster(launch)
            plan = cluster.plan
        for warning in (*plan.warnings, *(cluster.notes if cluster else ())):
            logger.warning("%s", warning)
        reloaded_here()  # ranks import modules as they are now
        self._settings = set_here(at_start=False)
        with Interrupts() as interrupts:
            try:
                self.options = options
                with self._starting():
                    self.group = RankGroup(launch, plan, self._on_rank_end, lambda: self.timeouts, cluster)
                    self._bring_up(range(self.group.size), interrupts)
            except BaseException:
                self.stop()
                if cluster is not None:
                    cluster.close()
                raise
            atexit.register(self.stop)
        self.pending = None

    def stop(self) -> None:
        """End every rank. Does nothing if there are none.

        At an interrupt, ranks that have not ended yet are killed; it is raised when all have ended.
        """
        if os.getpid() != self._pid:  # a process forked from the notebook's: the ranks are not its own
            return
        with Interrupts() as interrupts:
            if self.group is not None:
                self.group.close(interrupts, ask=self.accepts_cells and self.group.why_it_failed is None)
                self.group = None  # only now, so that a stop that was broken off can be repeated
            atexit.unregister(self.stop)
            self.variables.forget()
            self._running = self.failed_rank = None

    def restart(self, rank: int | None = None) -> list[int]:
        """Restart all ranks, or replace one. The others then keep their variables.

        Ranks that have ended are replaced too, because a process group needs them. If their machine is lost, its host
        is started again.

        Args:
            rank: the rank to replace; None for all, or those of machines that are lost.

        Returns:
            The ranks that are new.

        Raises:
            PoolError: there are no ranks.
            ConfigError: there is no such rank.
            StartError: a machine that is lost cannot be reached. The other ranks keep their variables.
        """
        if rank is not None:
            return self._replace([rank])
        if self.group is not None and self.group.placing.lost:
            return self._replace([])
        if self._stop_if_failed() is None and not self.has_ranks:
            raise PoolError(_NOT_READY[PoolState.STOPPED])
        options = self.options
        self.stop()
        self.start(options)
        return [*range(self.world_size)]

    def _replace(self, ranks: Sequence[int]) -> list[int]:
        """Replace these ranks, and those that have ended; return which are new."""
        group = self._require_group()
        group.check(ranks)
        self._check_idle()
        new = sorted({*ranks, *group.missing})
        with Interrupts() as interrupts:
            for ended in group.missing:
                group.remove(ended, interrupts)
        group.reopen()  # outside of the blocks, because an interrupt has to end the wait for a machine
        with Interrupts() as interrupts:
            for rank in ranks:
                group.remove(rank, interrupts)
            with self._starting():
                self._bring_up(new, interrupts)
        others = sorted({*range(self.world_size)} - {*new})
        if others:  # new ranks go on with the random numbers of the others
            state = self.call(RandomStates.here, ranks=others[:1])[0]
            self.call(state.use, ranks=new)
        return new

    # Work.

    def run(
        self,
        source: CellSource,
        options: CellOptions | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        sink: Sink | None = None,
    ) -> list[Any]:
        """Run a cell, wait for its end, and return the values of its last expression if these are wanted, by rank."""
        return self.finish(self.begin(source, options, variables=variables, sink=sink, in_background=False))

    def begin(
        self,
        source: CellSource,
        options: CellOptions | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        sink: Sink | None = None,
        in_background: bool = True,
        display_id: str = "",
    ) -> Request:
        """Start a cell when the one before has ended, and return its request; `finish` waits for its end."""
        # Plan what the ranks are sent for it when the cell before has ended, and they are connected.
        options = options or CellOptions()
        variables = sys.modules["__main__"].__dict__ if variables is None else variables
        self.wait()
        group = self._require_group()
        ranks = group.chosen(options.ranks)
        syncs = {rank.rank: self.variables.syncs[rank.rank] for rank in ranks}
        sink = sink or sink_here()
        output = RequestOutput(
            [*syncs], sink, group.display_ids, style=options.style, quiet=options.quiet, hold=self.timeouts.fold
        )
        if self.state is PoolState.DISCONNECTED:
            self._reconnect(output)
        kept = self.variables
        plan = plan_cell(source.free, variables, syncs, kept.object_ids, options.send, kept.trained)
        shipments = pack_plan(
            plan, self._changed_on_ranks, None if options.large else SIZE_LIMIT, group.placing.by_value
        )
        try:
            remarks, before = plan.remarks(group.plan.kind.name), plan.notebook_values(source.stored)
            del plan  # it holds objects of the notebook, which the cell may be meant to free
            request = cell_request(
                source,
                options,
                group,
                ranks,
                shipments,
                output,
                sink,
                hangs=self.timeouts,
                in_background=in_background,
                display_id=display_id,
            )
            for remark in remarks:
                output.say(remark)
            request.on_end = lambda: self._record_end(group, request, shipments, variables, before)
            # Once more, since packing runs code of users, by which another cell may have begun.
            self._check_idle()
        except BaseException:
            for shipment in shipments:
                shipment.packed.close()
            raise
        with interrupts_call(lambda: group.loop.interrupt(request)):
            # From before the request begins: an interrupt that came in between would leave it running, with nobody who
            # waits.
            self._running = request
            group.loop.begin(request)
            if not in_background:
                group.loop.attend(request)
        return request

    def finish(self, request: Request) -> list[Any]:
        """Wait for the end of a cell that was begun, and return what `run` returns."""
        if self.group is not None:
            self.group.loop.wait_for(request)
        self._stop_if_failed()
        return result_of(request)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no cell runs, at most `timeout` seconds, and return whether none does."""
        running = self._running
        return running is None or wait(running.done, timeout)

    def interrupt(self) -> None:
        """Interrupt the cell that runs. A second time, kill ranks that cannot be interrupted. For any thread."""
        request, group = self._running, self.group
        if request is not None and group is not None:
            group.loop.interrupt(request)

    def push(self, values: Mapping[str, Any], ranks: Sequence[int] | None = None, *, large: bool = False) -> None:
        """Define names on the ranks, also names that cells have bound there."""
        numbers = None if ranks is None else tuple(ranks)
        options = CellOptions(ranks=numbers, send=tuple(values), large=large, quiet=True)
        self.run(_NOTHING, options, variables=values)
        modules = [value for value in values.values() if isinstance(value, ModuleType)]
        own = tuple(module.__name__ for module in modules if is_users(getattr(module, "__file__", None) or "<frozen>"))
        if own:
            self.call(remote.reload, own, ranks=ranks)

    def pull(self, names: Sequence[str], ranks: Sequence[int] | None = None) -> list[list[Any]]:
        """Return the values of these variables, for each rank a list."""
        chosen = [rank.rank for rank in self._require_group().chosen(ranks)]
        try:
            values = self.call(remote.pull, tuple(names), ranks=chosen)
        except ShippingError as error:
            raise of_pulled(error, names) from None
        found = zip(chosen, values, strict=True)
        missing = {rank: value for rank, value in found if isinstance(value, remote.MissingName)}
        if not missing:
            return values
        name, near = next(iter(missing.values()))
        lacking = [rank for rank, absent in missing.items() if absent.name == name]
        hint = f". Did you mean: '{near}'?" if near else ""
        if len(lacking) == self.world_size > 1:
            raise NameError(f"no rank has a variable {name!r}{hint}")
        raise NameError(f"{named(lacking)} {'has' if len(lacking) == 1 else 'have'} no variable {name!r}{hint}")

    def differing(self, names: Sequence[str]) -> list[str]:
        """Return which of these variables have another value on some rank, or are not there."""
        found = zip(names, *self.call(remote.checksums, tuple(names), ranks=self._require_group().alive), strict=True)
        return [name for name, *sums in found if len(set(sums)) > 1]

    def follow_settings(self) -> None:
        """Set the ranks to what this process is set to now."""
        settings = set_here(at_start=False)
        changed = differences(self._settings, settings, is_elsewhere=self.is_elsewhere)
        if changed:
            self.call(use_settings, pack_settings(changed), ranks=self._require_group().alive)
        self._settings = settings

    def reset(self) -> None:
        """Delete all variables of the ranks."""
        self.call(remote.reset, (*RANK_NAMES, *SHELL_NAMES))
        self.variables.forget()

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a function on ranks, and return what it returned, by rank."""
        group = self._require_group()
        self.wait()
        chosen = group.chosen(ranks)
        name = getattr(function, "__name__", "function")
        with pack(
            (function, args, {}), name=name, by_value=group.placing.by_value, globals_there=Globals.OF_RECEIVER
        ) as packed:
            call = Call(parcel=packed.parcel)
            request = group.request(chosen, lambda rank: rank.handle.ask(call, packed.fds), timeout=timeout)
            try:
                with interrupts_call(lambda: group.loop.interrupt(request)):
                    group.loop.begin(request)
                    group.loop.attend(request)
                return result_of(request)
            finally:
                # The connections of a rank that was taken out of a collective are gone: the ranks meet again before the
                # next cell.
                if StepKind.CUT in request.steps_taken and self.world_size > 1:
                    group.is_disconnected = True

    # From outside.

    def status(self) -> list[RankStatus]:
        """Return the state of every rank, without asking them."""
        group, busy = self._require_group(), self._busy_ranks()
        ranks = group.ranks
        return [
            status_of(ranks[number], busy=number in busy, device=ranks[number].device)
            if number not in group.missing
            else RankStatus(
                rank=number,
                machine=ranks[number].handle.machine if number in ranks else "",
                pid=None,
                state="ended",
                doing=group.how_it_ended(number),
            )
            for number in range(group.size)
        ]

    def where(self) -> dict[int, str]:
        """Return where every rank is in its code, also while it runs a cell: in a few words, by rank."""
        group = self._require_group()
        return locate_ranks(group.ranks, self._busy_ranks(), self.timeouts.stacks, group.loop.post)

    def _busy_ranks(self) -> set[int]:
        return {rank.rank for rank in self._running.waiting} if self._running is not None and self._is_busy else set()

    # Internal.

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        self._is_starting = True
        try:
            yield
        finally:
            self._is_starting = False

    @property
    def _is_busy(self) -> bool:
        running = self._running
        return running is not None and not running.done.is_set()

    def _check_idle(self) -> None:
        if self.state in _NOT_READY:
            raise PoolError(_NOT_READY[self.state])

    def _require_group(self) -> RankGroup:
        error = self._stop_if_failed()
        if error is not None:
            raise error
        if self.group is None:
            raise PoolError(_NOT_READY[PoolState.STOPPED])
        return self.group

    def _stop_if_failed(self) -> BaseException | None:
        """Stop a pool whose thread has failed. Returns the error, or None if it has not failed."""
        error = self.group.why_it_failed if self.group is not None else None
        if error is not None:
            self.stop()
        return error

    def _bring_up(self, ranks: Sequence[int], interrupts: Interrupts) -> None:
        group = self._require_group()
        self.variables.begin(ranks)
        group.bring_up(ranks, interrupts)
        for sync in self.variables.syncs.values():
            sync.note_rejoined()

    def _changed_on_ranks(self, keys: Mapping[int, set[Key]]) -> set[Key]:
        every = tuple(set[Key]().union(*keys.values()))
        return set[Key]().union(*self.call(changed_there, every, ranks=[*keys]))

    def _reconnect(self, output: RequestOutput) -> None:
        unseen, self._disconnected_silently = self._disconnected_silently, False
        began = time.monotonic()
        with Interrupts() as interrupts, self._starting():
            self._bring_up((), interrupts)
        said = f"the process group was made again in {time.monotonic() - began:.1f} s; variables are kept"
        output.note(f"in the cell before, the ranks were not in the same collectives: {said}" if unseen else said)

    def _record_end(
        self,
        group: RankGroup,
        request: Request,
        shipments: Sequence[Shipment],
        variables: Mapping[str, Any],
        before: Mapping[str, NotebookValue],
    ) -> None:
        """Note what a cell that has ended did to the ranks. Called in the loop's thread.

        Args:
            before: what the notebook had, when it began, under names that it binds for certain.
        """
        trained = self.variables.trained
        for number, end in request.cell_ends.items():
            sync = self.variables.syncs[number]
            for shipment in shipments:
                if end.has_names and number in shipment.ranks:
                    sync.note_sent(shipment.sent, shipment.contents, shipment.uses)
                    sync.note_dropped(shipment.deleted)
            sync.note_gone(end.gone)
            # Python has one object for a small number: that it is bound again is seen in the source alone.
            again = [name for name in before if sync.is_there(name)] if isinstance(end.answer, Result) else ()
            had = {**{name: NotebookValue.of(name, variables) for name in (*end.bound, *end.unbound)}, **before}
            sync.note_bound({name: had[name] for name in (*end.bound, *again)})
            sync.note_unbound({name: had[name] for name in end.unbound})
            group.ranks[number].steps = end.steps
        ends = request.cell_ends.values()
        received = [name for shipment in shipments for name in shipment.sent]
        for name in (*received, *(name for end in ends for name in (*end.bound, *end.unbound))):
            trained.pop(name, None)
        names = {name for end in ends for name in end.trained}
        trained |= {name: NotebookValue.of(name, variables) for name in names}
        self.variables.announced.difference_update(received)
        first_last = [name for name in reversed(list(variables)) if name in names]
        kinds = ("nn.Module", "Tensor")
        first = {id(variables[n]): n for n in first_last if any(is_of_torch(variables[n], kind) for kind in kinds)}
        news = sorted(set(first.values()) - self.variables.announced)
        self.variables.announced.update(news)
        if news and request.output is not None:
            were = f"{' and '.join(news)} {'was' if len(news) == 1 else 'were'}"
            request.output.note(f"{were} trained on the ranks: %distributed pull {' '.join(news)}")
        self.failed_rank = request.failed_rank if request.failed_rank is not None else self.failed_rank
        if breaks_group(request, group.ranks, group.plan.backend):
            group.is_disconnected = True
            self._disconnected_silently = not request.incidents
        self._running = None

    def _on_rank_end(self, error: BaseException) -> None:
        """Say that a rank has ended, unless the error of a cell will. Called in the loop's thread."""
        if self.group is not None and not self._is_busy and not self._is_starting:
            self.group.loop.say(str(error))
