"""A pool: ranks that stay, and run one cell after the other."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from nb_accelerate.display import choose_front_end
from nb_accelerate.errors import ShippingError, TooLargeError
from nb_accelerate.pool.group import RankGroup
from nb_accelerate.pool.lifecycle import State, move
from nb_accelerate.pool.names import names_in
from nb_accelerate.pool.namespace_sync import GIVEN, SHELLS, Ledger
from nb_accelerate.pool.options import CellOptions, PoolOptions
from nb_accelerate.pool.outcome import came_apart, result_of, tell_failure
from nb_accelerate.pool.panel import cell_panel
from nb_accelerate.pool.rank_info import info, whereabouts
from nb_accelerate.pool.shipping import SIZE_LIMIT, make_manifest
from nb_accelerate.pool.starting import plan_pool
from nb_accelerate.protocol.messages import Call, RunCell
from nb_accelerate.protocol.shipping import pack
from nb_accelerate.ranks.guarded import GuardedOutput
from nb_accelerate.ranks.request_output import CellOutput
from nb_accelerate.ranks.sinks import sink_here
from nb_accelerate.ranks.waiting import Interrupts, interrupts_go_to, wait_for
from nb_accelerate.worker import namespace as remote

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nb_accelerate.pool.rank_info import RankInfo
    from nb_accelerate.pool.source import CellSource
    from nb_accelerate.protocol.shipping import Packed
    from nb_accelerate.ranks.proxy import Member
    from nb_accelerate.ranks.request import Turn
    from nb_accelerate.ranks.sinks import Sink


class Pool:
    """Ranks that stay. `start` it; `stop` it.

    One cell runs at a time. Methods are for the notebook's thread; `interrupt` is for any.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._state = State.STOPPED
        self._options = PoolOptions()
        self._group: RankGroup | None = None
        self._ledgers: dict[int, Ledger] = {}
        self._running: Turn | None = None
        self._failed_rank: int | None = None
        self._apart_unseen = False

    # What it is.

    @property
    def state(self) -> State:
        """What it is doing."""
        self.wait(0)  # takes note of a cell that has ended in the background
        return self._state

    @property
    def is_running(self) -> bool:
        """Are there ranks?"""
        return self._state is not State.STOPPED

    @property
    def is_idle(self) -> bool:
        """Would ranks answer at once?"""
        return self._state not in (State.STOPPED, State.STARTING) and not self._is_busy

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
        self._move("start")
        with Interrupts() as interrupts:
            try:
                self._options = options
                self._group = RankGroup(launch, plan, self._on_loss)
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
                is_idle = not self._is_busy and self._state is not State.STARTING and self._group.why_it_failed is None
                self._group.close(interrupts, ask=is_idle)
                self._group = None  # only now: what was broken off can be repeated
            self._state = move(self._state, "stop")
            atexit.unregister(self.stop)
            self._ledgers.clear()
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
            self._move("repair")
        if rank is None:
            options = self._options
            self.stop()
            self.start(options)
            return [*range(self.world_size)]
        group = self._the_group()
        group.check((rank,))
        self.wait(0)  # takes note of a cell that has ended in the background
        if self._is_busy:
            self._move("repair")  # says that it cannot be now
        new = sorted({rank, *group.missing})
        with Interrupts() as interrupts:
            for one in new:
                group.remove(one, interrupts)
            self._move("repair")
            self._bring_up(new, interrupts)
        return new

    def lacking(self, rank: int) -> list[str]:
        """Names that cells bound on other ranks, and that this one has not."""
        others: set[str] = set()
        for ledger in self._ledgers.values():
            others |= ledger.own
        return sorted(others - self._ledgers[rank].own)

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
        turn, begin = self._prepare(source, options, variables=variables, sink=sink)
        crew = self._the_group().crew
        with interrupts_go_to(crew, turn):
            begin()
            wait_for(crew, turn)
        return self.finish(turn)

    def begin(
        self,
        source: CellSource,
        options: CellOptions | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        sink: Sink | None = None,
        tell: bool = False,
    ) -> Turn:
        """Start a cell, and do not wait: see `run`. `finish` it, at some time.

        With `tell` its failure is said in the cell, since nobody may ask for the result.
        """
        turn, begin = self._prepare(source, options, variables=variables, sink=sink, tell=tell)
        begin()
        return turn

    def _prepare(
        self,
        source: CellSource,
        options: CellOptions | None,
        *,
        variables: Mapping[str, Any] | None,
        sink: Sink | None,
        tell: bool = False,
    ) -> tuple[Turn, Callable[[], None]]:
        """Everything that comes before the ranks are asked; gives the turn, and what begins it."""
        options = options or CellOptions()
        variables = sys.modules["__main__"].__dict__ if variables is None else variables
        self.wait()
        group = self._the_group()
        members = group.chosen(options.ranks)
        sink = sink or sink_here()
        ranks = [member.rank for member in members]
        shown = CellOutput(ranks, sink, group.crew.ids, style=options.style, quiet=options.quiet)
        output = GuardedOutput(shown, sink)
        if self._state is State.APART:
            self._meet_again(output)
        self._check_names(options.send, variables)
        ledgers = {member.rank: self._ledgers[member.rank] for member in members}
        manifest = make_manifest(source.free, variables, ledgers, forced=options.send)
        try:
            self._say_what_is_own(manifest.own, ledgers, output)

            def send(member: Member) -> None:
                packed = manifest.packed_for(member.rank)
                message = RunCell(
                    code=source.code,
                    filename=source.filename,
                    source=source.text,
                    above=source.above,
                    is_python=source.is_python,
                    names=packed.parcel if packed else None,
                    wants_value=options.wants_values,
                    wants_accelerator=source.wants_accelerator,
                )
                with contextlib.suppress(ConnectionError):  # it has just ended, which its status pipe tells
                    member.handle.ask(message, packed.fds if packed else ())

            turn = group.turn(members, send, timeout=options.timeout, say=output.say)
            turn.attended = not tell
            turn.callbacks.append(manifest.close)
            if tell:
                turn.callbacks.append(lambda: tell_failure(turn, output.say))
            front_end = "off" if options.quiet else choose_front_end(options.progress)
            panel = None
            with output.guard:
                interrupt = functools.partial(group.crew.interrupt, turn)
                panel = cell_panel(turn, source.filename, group.plan, sink, interrupt, front_end)
        except BaseException:
            manifest.close()
            raise

        def begin() -> None:
            try:
                self._move("run")
            except BaseException:
                manifest.close()
                raise
            self._running = turn
            for shipment in manifest.shipments:
                for rank in shipment.ranks:
                    self._ledgers[rank].sent(shipment.values, shipment.uses)
                    turn.sent[rank] = tuple(shipment.values)
            group.crew.begin(turn, output, watch_for_hangs=True, panel=panel)

        return turn, begin

    def finish(self, turn: Turn) -> list[Any]:
        """Wait for the end of a cell; see `run`."""
        if self._group is not None:
            wait_for(self._group.crew, turn)
        self._settle(turn)
        return result_of(turn)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no cell runs, one in the background say. True if none does."""
        turn = self._running
        if turn is None:
            return True
        if not turn.done.wait(timeout):
            return False
        self._settle(turn)
        return True

    def interrupt(self) -> None:
        """Interrupt the cell that runs; a second time, kill ranks that cannot be interrupted. Any thread."""
        turn, group = self._running, self._group
        if turn is not None and group is not None:
            group.crew.interrupt(turn)

    def push(self, values: Mapping[str, Any], ranks: Sequence[int] | None = None, *, large: bool = False) -> None:
        """Define names on the ranks, also if they have their own of that name.

        Raises:
            ShippingError: a value cannot be pickled; says which part.
            TooLargeError: it is more than a gigabyte, and not said to be `large`.
        """
        members = self._ready(ranks)
        try:
            packed = pack((remote.push, (dict(values),), {}), into_main=True, limit=None if large else SIZE_LIMIT)
        except TooLargeError as error:
            raise TooLargeError(
                f"{', '.join(values)}: {error.size / 2**30:.1f} GiB would be copied to the ranks. To copy them: "
                f"%distributed push {' '.join(values)} --large",
                size=error.size,
            ) from None
        except ShippingError as error:
            part = error.path.partition("]['")[2]  # its path begins with our own tuple
            raise ShippingError(str(error).replace(error.path, f"['{part}"), path=f"['{part}") from error
        uses = frozenset[str]().union(*(names_in(code) for code in packed.codes))
        with packed:
            self._call(members, packed)
        for member in members:
            self._ledgers[member.rank].sent(values, uses)

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
        for rank in self._ledgers:
            self._ledgers[rank] = Ledger()

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
        members = self._ready(ranks)
        with pack((function, args, {}), name=getattr(function, "__name__", "function"), into_main=True) as packed:
            return self._call(members, packed, timeout)

    def _call(self, members: Sequence[Member], packed: Packed, timeout: float | None = None) -> list[Any]:
        def send(member: Member) -> None:
            with contextlib.suppress(ConnectionError):  # as above
                member.handle.ask(Call(parcel=packed.parcel), packed.fds)

        group = self._the_group()
        turn = group.turn(members, send, timeout=timeout)
        try:
            with Interrupts() as interrupts:
                return group.ask(turn, interrupts)
        finally:
            if turn.was_cut and self.world_size > 1 and not group.missing:
                self._move("broke off")

    # Looking.

    def status(self) -> list[RankInfo]:
        """What every rank is. Asks nothing of the ranks."""
        group = self._the_group()
        return [
            info(rank, group.members.get(rank), busy=rank in self._busy_ranks(), lost=group.how_it_ended(rank))
            for rank in range(group.size)
        ]

    def where(self) -> dict[int, str]:
        """Where every rank is, also while it runs a cell: in a few words, by rank."""
        return whereabouts(self._the_group().members, self._busy_ranks())

    def _busy_ranks(self) -> set[int]:
        busy = self._running
        return set() if busy is None or busy.done.is_set() else {member.rank for member in busy.waiting}

    # Inside.

    def _move(self, event: str) -> None:
        self._state = move(self._state, event)

    @property
    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.done.is_set()

    def _the_group(self) -> RankGroup:
        error = self._clear_away_what_failed()
        if error is not None:
            raise error
        if self._group is None:
            self._move("run")  # says what to do
            raise AssertionError
        return self._group

    def _clear_away_what_failed(self) -> BaseException | None:
        """End what is left of a pool whose thread has failed; gives the error, if it has."""
        error = self._group.why_it_failed if self._group is not None else None
        if error is not None:
            self.stop()
        return error

    def _ready(self, ranks: Sequence[int] | None) -> list[Member]:
        group = self._the_group()
        self.wait()
        return group.chosen(ranks)

    def _check_names(self, names: Sequence[str], variables: Mapping[str, Any]) -> None:
        for name in names:
            if name not in variables:
                raise NameError(f"name {name!r} is not defined in the notebook, so it cannot be sent to the ranks")

    def _bring_up(self, ranks: Sequence[int], interrupts: Interrupts) -> None:
        """Start these ranks, and have all of them meet."""
        group = self._the_group()
        for rank in ranks:
            self._ledgers[rank] = Ledger()
        try:
            group.bring_up(ranks, interrupts)
        except BaseException:
            self._move("lost" if group.missing else "broke off")
            raise
        self._move("joined")

    def _meet_again(self, output: GuardedOutput) -> None:
        self._move("repair")
        unseen, self._apart_unseen = self._apart_unseen, False
        began = time.monotonic()
        with Interrupts() as interrupts:
            self._bring_up((), interrupts)
        anew = f"the process group was made anew in {time.monotonic() - began:.1f} s; variables are kept"
        output.note(f"in the cell before, the ranks were not in the same collectives: {anew}" if unseen else anew)

    def _settle(self, turn: Turn) -> None:
        """A cell has ended: take note of what ranks bound, and of what it did to them."""
        if self._running is not turn:
            return
        self._running = None
        group = self._group
        if group is None or self._clear_away_what_failed() is not None:
            return
        self._failed_rank = turn.failed_rank if turn.failed_rank is not None else self._failed_rank
        for rank, end in turn.ends.items():
            if not end.has_names:
                self._ledgers[rank].unbound(turn.sent.get(rank, ()))
            self._ledgers[rank].bound(end.bound)
            self._ledgers[rank].unbound(end.unbound)
        if group.missing:
            self._move("lost")
        elif came_apart(turn, group.members, group.plan.backend):
            self._apart_unseen = not turn.troubles
            self._move("broke off")
        else:
            self._move("ended")

    def _on_loss(self, error: BaseException) -> None:
        """In the crew's thread: a rank has ended."""
        if not self._is_busy and self._state in (State.IDLE, State.RUNNING, State.APART, State.BROKEN):
            self._move("lost")
            if self._group is not None:
                self._group.crew.say(str(error))

    def _say_what_is_own(self, own: Mapping[str, Any], ledgers: Mapping[int, Ledger], output: GuardedOutput) -> None:
        news = [
            name for name, value in sorted(own.items()) if sum(one.is_news(name, value) for one in ledgers.values())
        ]
        if news:
            names = ", ".join(news)
            output.say(
                f"the ranks have their own {names}; what the notebook calls {names} was not sent to them. To send it: "
                f"%distributed push {' '.join(news)}"
            )
