"""A pool: ranks that stay, and run one cell after the other. One class, with a method for each thing users can do."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar

from nb_accelerate.pool.cell import Cell
from nb_accelerate.pool.group import RankGroup, came_apart, result_of
from nb_accelerate.pool.lifecycle import PoolState, check, state_of
from nb_accelerate.pool.namespace_sync import GIVEN, SHELLS, NamespaceSync
from nb_accelerate.pool.options import CellOptions, PoolOptions
from nb_accelerate.pool.shipping import pack_to_push
from nb_accelerate.pool.starting import plan_pool
from nb_accelerate.protocol.messages import Call
from nb_accelerate.protocol.shipping import pack
from nb_accelerate.ranks.guard import GuardedOutput
from nb_accelerate.ranks.request_output import RequestOutput
from nb_accelerate.ranks.sinks import sink_here
from nb_accelerate.ranks.status import RankStatus, locate_ranks, look_at
from nb_accelerate.ranks.steps import StepKind
from nb_accelerate.ranks.timeouts import Timeouts
from nb_accelerate.ranks.waiting import Interrupts, interrupts_call, wait_for
from nb_accelerate.worker import namespace as remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nb_accelerate.pool.rank import PoolRank
    from nb_accelerate.pool.source import CellSource
    from nb_accelerate.protocol.shipping import Packed
    from nb_accelerate.ranks.request import Request
    from nb_accelerate.ranks.sinks import Sink


class Pool:
    """Ranks that stay. `start` it; `stop` it.

    One cell runs at a time. Methods are for the notebook's thread; `interrupt` is for any.

    Attributes:
        timeouts: how long the steps of what begins from now on may take.
    """

    timeouts: ClassVar[Timeouts] = Timeouts(ask=0.2, cause=0.0, interrupt=0.4, quit=5.0, stacks=0.5)

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._options = PoolOptions()
        self._is_starting = False
        self._group: RankGroup | None = None
        self._syncs: dict[int, NamespaceSync] = {}
        self._running: Request | None = None
        self._failed_rank: int | None = None
        self._apart_unseen = False

    # What it is.

    @property
    def state(self) -> PoolState:
        """What it is doing."""
        group = self._group
        return state_of(
            exists=group is not None,
            starts=self._is_starting,
            runs=self._is_busy,
            lacks_ranks=group is not None and bool(group.missing),
            is_apart=group is not None and group.is_apart,
        )

    @property
    def group(self) -> RankGroup | None:
        """The ranks; None if there are none."""
        return self._group

    @property
    def is_running(self) -> bool:
        """There are ranks."""
        return self._group is not None or self._is_starting

    @property
    def is_idle(self) -> bool:
        """Ranks would answer at once."""
        return self.state in (PoolState.IDLE, PoolState.APART, PoolState.BROKEN)

    @property
    def world_size(self) -> int:
        """Number of ranks, also of those that have ended."""
        return self._group.size if self._group else 0

    @property
    def options(self) -> PoolOptions:
        """How it was started."""
        return self._options

    def describe(self) -> str:
        """One line about the ranks."""
        return self._group.plan.describe() if self._group else "no ranks"

    @property
    def lost(self) -> dict[int, str]:
        """Ranks that have ended, and how."""
        group = self._group
        return {} if group is None else {rank: group.how_it_ended(rank) for rank in group.missing}

    @property
    def failed_rank(self) -> int | None:
        """Where a cell failed last; the first of several ranks."""
        return self._failed_rank

    # Start and end.

    def start(self, options: PoolOptions | None = None) -> None:
        """Start the ranks, and wait until they have met.

        Raises:
            PoolError: they run already.
            ConfigError: an option cannot be on this machine.
            StartError: a rank could not be started.
        """
        options = options or PoolOptions()
        launch, plan = plan_pool(options)
        self._clear_away_what_failed()
        check(self.state, "start")
        with Interrupts() as interrupts:
            try:
                self._options = options
                with self._starting():
                    self._group = RankGroup(launch, plan, self._on_loss, lambda: self.timeouts)
                    self._bring_up(range(plan.num_processes), interrupts)
            except BaseException:
                self.stop()
                raise
            atexit.register(self.stop)

    def stop(self) -> None:
        """End every rank; nothing is left. Does nothing where nothing runs.

        An interrupt ends ranks at once that take their time, and is raised when all have ended.
        """
        if os.getpid() != self._pid:  # a process forked from the notebook's: the ranks are not its own
            return
        with Interrupts() as interrupts:
            if self._group is not None:
                self._group.close(interrupts, ask=self.is_idle and self._group.why_it_failed is None)
                self._group = None  # only now: what was broken off can be repeated
            atexit.unregister(self.stop)
            self._syncs.clear()
            self._running = self._failed_rank = None

    def restart(self, rank: int | None = None) -> list[int]:
        """Start all ranks anew, or put a new rank in the place of one; the others keep their variables.

        Ranks that have ended are replaced too: without them the others cannot meet.

        Returns:
            The ranks that are new.

        Raises:
            PoolError: there are no ranks.
            ConfigError: there is no such rank.
        """
        error = self._clear_away_what_failed()
        if error is not None and rank is not None:
            raise error
        if not self.is_running and error is None:
            check(self.state, "repair")
        if rank is None:
            options = self._options
            self.stop()
            self.start(options)
            return [*range(self.world_size)]
        group = self._the_group()
        group.check((rank,))
        check(self.state, "repair")
        new = sorted({rank, *group.missing})
        with Interrupts() as interrupts:
            for one in new:
                group.remove(one, interrupts)
            with self._starting():
                self._bring_up(new, interrupts)
        return new

    def lacking(self, rank: int) -> list[str]:
        """Names that cells bound on other ranks, and that this one has not."""
        others: set[str] = set()
        for sync in self._syncs.values():
            others |= sync.own
        return sorted(others - self._syncs[rank].own)

    # Work.

    def run(
        self,
        source: CellSource,
        options: CellOptions | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        sink: Sink | None = None,
    ) -> list[Any]:
        """Run a cell, and wait for its end.

        Args:
            source: the cell.
            options: how.
            variables: where names that the ranks lack are looked up; ``__main__`` by default.
            sink: where output goes; by default to where the calling code prints.

        Returns:
            With ``wants_values`` the values of the last expression, by rank.

        Raises:
            KeyboardInterrupt: it was interrupted.
            RankDiedError: a rank has ended.
            DeadlineError: it took too long.
            BaseException: what the cell raised on a rank.
        """
        request, begin = self._prepare(source, options, variables=variables, sink=sink)
        loop = self._the_group().loop
        with interrupts_call(lambda: loop.interrupt(request)):
            begin()
            wait_for(loop, request)
        return self.finish(request)

    def begin(
        self,
        source: CellSource,
        options: CellOptions | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        sink: Sink | None = None,
        tell: bool = False,
    ) -> Request:
        """Start a cell, and do not wait: see `run`. `finish` it, at some time.

        With `tell` its failure is said in the cell, since nobody may ask for the result.
        """
        request, begin = self._prepare(source, options, variables=variables, sink=sink, tell=tell)
        begin()
        return request

    def _prepare(
        self,
        source: CellSource,
        options: CellOptions | None,
        *,
        variables: Mapping[str, Any] | None,
        sink: Sink | None,
        tell: bool = False,
    ) -> tuple[Request, Callable[[], None]]:
        """Do everything that comes before the ranks are asked; gives the request, and what begins it."""
        options = options or CellOptions()
        variables = sys.modules["__main__"].__dict__ if variables is None else variables
        self.wait()
        group = self._the_group()
        sink = sink or sink_here()
        shown = RequestOutput(
            [rank.rank for rank in group.chosen(options.ranks)],
            sink,
            group.display_ids,
            style=options.style,
            quiet=options.quiet,
            hold=self.timeouts.fold,
        )
        output = GuardedOutput(shown, sink)
        if self.state is PoolState.APART:
            self._meet_again(output)
        cell = Cell(source, options, group, self._syncs, variables, output, sink, in_background=tell)
        cell.request.take_note = functools.partial(self._take_note, group, cell)

        def begin() -> None:
            try:
                check(self.state, "run")
            except BaseException:
                cell.close()
                raise
            self._running = cell.request
            cell.begin(self.timeouts)

        return cell.request, begin

    def finish(self, request: Request) -> list[Any]:
        """Wait for the end of a cell; see `run`."""
        if self._group is not None:
            wait_for(self._group.loop, request)
            self._clear_away_what_failed()
        return result_of(request)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no cell runs, one in the background say. True if none does."""
        running = self._running
        return running is None or running.done.wait(timeout)

    def interrupt(self) -> None:
        """Interrupt the cell that runs; a second time, kill ranks that cannot be interrupted. Any thread."""
        request, group = self._running, self._group
        if request is not None and group is not None:
            group.loop.interrupt(request)

    def push(self, values: Mapping[str, Any], ranks: Sequence[int] | None = None, *, large: bool = False) -> None:
        """Define names on the ranks, also if they have their own of that name.

        Raises:
            ShippingError: a value cannot be pickled; says which part.
            TooLargeError: it is more than a gigabyte, and not said to be `large`.
        """
        chosen = self._ready(ranks)
        packed, uses = pack_to_push(values, large=large)
        with packed:
            self._call(chosen, packed)
        for rank in chosen:
            self._syncs[rank.rank].sent(values, uses)

    def pull(self, names: Sequence[str], ranks: Sequence[int] | None = None) -> list[list[Any]]:
        """Values of names: for each rank a list, in the order of `names`.

        Raises:
            NameError: a rank has no such name.
            ShippingError: a value cannot be pickled.
        """
        values: list[list[Any]] = self.call(remote.pull, tuple(names), ranks=ranks)
        return values

    def reset(self) -> None:
        """Delete all variables of the ranks."""
        self.call(remote.reset, (*GIVEN, *SHELLS))
        for rank in self._syncs:
            self._syncs[rank] = NamespaceSync()

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a function on ranks; gives what each returned.

        Raises:
            PoolError: there are no ranks.
            BaseException: what the function raised on a rank.
        """
        chosen = self._ready(ranks)
        with pack((function, args, {}), name=getattr(function, "__name__", "function"), into_main=True) as packed:
            return self._call(chosen, packed, timeout)

    def _call(self, ranks: Sequence[PoolRank], packed: Packed, timeout: float | None = None) -> list[Any]:
        def send(rank: PoolRank) -> None:
            with contextlib.suppress(ConnectionError):  # as above
                rank.handle.ask(Call(parcel=packed.parcel), packed.fds)

        group = self._the_group()
        request = group.request(ranks, send, timeout=timeout)
        try:
            with Interrupts() as interrupts:
                return group.ask(request, interrupts)
        finally:
            if StepKind.CUT in request.taken and self.world_size > 1:
                group.is_apart = True

    # Looking.

    def status(self) -> list[RankStatus]:
        """What every rank is. Asks nothing of the ranks."""
        group, busy = self._the_group(), self._busy_ranks()
        ranks = group.ranks
        return [
            look_at(ranks[number], busy=number in busy, device=ranks[number].device)
            if number not in group.missing
            else RankStatus(rank=number, pid=None, state="ended", doing=group.how_it_ended(number))
            for number in range(group.size)
        ]

    def where(self) -> dict[int, str]:
        """Where every rank is, also while it runs a cell: in a few words, by rank."""
        return locate_ranks(self._the_group().ranks, self._busy_ranks(), self.timeouts.stacks)

    def _busy_ranks(self) -> set[int]:
        busy = self._running
        return set() if busy is None or busy.done.is_set() else {rank.rank for rank in busy.waiting}

    # Inside.

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

    def _the_group(self) -> RankGroup:
        error = self._clear_away_what_failed()
        if error is not None:
            raise error
        if self._group is None:
            check(PoolState.STOPPED, "run")
            raise AssertionError
        return self._group

    def _clear_away_what_failed(self) -> BaseException | None:
        """End what is left of a pool whose thread has failed; gives the error, if it has."""
        error = self._group.why_it_failed if self._group is not None else None
        if error is not None:
            self.stop()
        return error

    def _ready(self, ranks: Sequence[int] | None) -> list[PoolRank]:
        group = self._the_group()
        self.wait()
        return group.chosen(ranks)

    def _bring_up(self, ranks: Sequence[int], interrupts: Interrupts) -> None:
        """Start these ranks, and have all of them meet."""
        group = self._the_group()
        for rank in ranks:
            self._syncs[rank] = NamespaceSync()
        group.bring_up(ranks, interrupts)

    def _meet_again(self, output: GuardedOutput) -> None:
        unseen, self._apart_unseen = self._apart_unseen, False
        began = time.monotonic()
        with Interrupts() as interrupts, self._starting():
            self._bring_up((), interrupts)
        anew = f"the process group was made anew in {time.monotonic() - began:.1f} s; variables are kept"
        output.note(f"in the cell before, the ranks were not in the same collectives: {anew}" if unseen else anew)

    def _take_note(self, group: RankGroup, cell: Cell) -> None:
        """In the loop's thread, when a cell ends: what it did to the ranks."""
        cell.take_note()
        request = cell.request
        self._failed_rank = request.failed_rank if request.failed_rank is not None else self._failed_rank
        if came_apart(request, group.ranks, group.plan.backend):
            group.is_apart = True
            self._apart_unseen = not request.incidents
        self._running = None

    def _on_loss(self, error: BaseException) -> None:
        """In the loop's thread: a rank has ended. While a cell runs, its error says so."""
        if self._group is not None and not self._is_busy and not self._is_starting:
            self._group.loop.say(str(error))
