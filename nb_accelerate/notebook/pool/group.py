"""The ranks of a pool as a group: they are started, connected, reconnected, replaced, and ended.

::

    start --> Setup --> Join, all of them --+--> in one process group
                          ^                 |
                          +-- reconnect <---+--> a rank is lost --> a new one in its place --> Setup --> Join, all

New ranks have no variables yet: one that does not join is killed. Ranks with variables are taken out of the
rendezvous, and killed only if that does not work: every wait of a rendezvous has a deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.devices import backend_named
from nb_accelerate.base.topology.rank_lists import as_option, named
from nb_accelerate.errors import ConfigError, PoolError, StartError
from nb_accelerate.notebook.launch.placing import PlacingHere
from nb_accelerate.notebook.launch.setup import pack_notebook
from nb_accelerate.notebook.protocol.messages import CutOff, Join, Result
from nb_accelerate.notebook.protocol.shipping import unpack
from nb_accelerate.notebook.ranks.end_reports import end_reports
from nb_accelerate.notebook.ranks.failing.errors import death, error_of, how_it_ended
from nb_accelerate.notebook.ranks.failing.incidents import Wording
from nb_accelerate.notebook.ranks.loop import RankLoop
from nb_accelerate.notebook.ranks.output.request_output import DisplayIds
from nb_accelerate.notebook.ranks.output.sinks import say_here
from nb_accelerate.notebook.ranks.proxy import RankProxy
from nb_accelerate.notebook.ranks.request import Awaits, Request
from nb_accelerate.notebook.ranks.steps import StepKind, cell_steps, stop_steps
from nb_accelerate.notebook.ranks.waiting import wait
from nb_accelerate.notebook.worker.server.limits import explain_resource_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.launch.placing import Placing
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.launch.rendezvous import Rendezvous
    from nb_accelerate.notebook.ranks.timeouts import Timeouts
    from nb_accelerate.notebook.ranks.waiting import Interrupts


def _after_end(rank: RankProxy) -> str:
    if not rank.has_joined:
        return " while it was being started"
    handle, others = rank.handle, rank.handle.neighbours
    if handle.exitcode is None and handle.is_lost_with_others and not rank.why_lost:
        if others is None:
            return (
                f". So are all other ranks and their variables. To start them again: %distributed restart {rank.rank}"
            )
        if others:
            return (
                f". So {'is' if len(others) == 1 else 'are'} {named(others)}. Their variables are lost; those of "
                f"ranks that live are kept. To replace them: %distributed restart {rank.rank}"
            )
    return (
        f". Its variables are lost; those of ranks that live are kept. To replace it: %distributed restart {rank.rank}"
    )


_CELL = Wording(what="the cell", after_end=_after_end, unusable=PoolError, unseen=PoolError)


class RankGroup:
    """Owns the ranks, the thread that listens to them, and the server that starts them. `close` it.

    Create it inside `Interrupts`: an interrupt must not come between two of its steps.

    Args:
        on_rank_end: called, in the loop's thread, with what happened when a rank has ended.
        timeouts: gives how long the steps of what begins now may take.
        placing: starts the ranks, and is taken over; None if they are on this machine.
    """

    @explain_resource_errors()
    def __init__(
        self,
        options: LaunchOptions,
        plan: LaunchPlan,
        on_rank_end: Callable[[BaseException], None],
        timeouts: Callable[[], Timeouts],
        placing: Placing | None = None,
    ) -> None:
        self.plan = plan
        self.is_disconnected = False  # whether the ranks have no process group of use, so that they must be reconnected
        self.display_ids = DisplayIds()
        self._timeouts = timeouts
        self._tell = on_rank_end
        self._rendezvous_count = 0
        self.placing = placing or PlacingHere(options, plan)
        try:
            self.loop = RankLoop(on_rank_end=self._on_rank_end)
            self.loop.start()
        except BaseException:
            self.placing.close()
            raise

    @property
    def size(self) -> int:
        """Number of ranks, with ended ones."""
        return self.plan.num_processes

    @property
    def ranks(self) -> dict[int, RankProxy]:
        """The ranks that were started and not removed, by rank."""
        return dict(self.loop.ranks)

    @property
    def missing(self) -> list[int]:
        """Ranks that have ended, or were not started."""
        ranks = self.ranks
        return [number for number in range(self.size) if number not in ranks or ranks[number].is_gone]

    @property
    def alive(self) -> list[int]:
        return [number for number in range(self.size) if number not in self.missing]

    def reopen(self) -> None:
        """Start the hosts of lost machines again. An interrupt ends the wait for them."""
        try:
            self.placing.reopen()
        except StartError as error:
            said, alive = f"{error}\nWhen it is back: %distributed restart", self.alive
            if alive:
                said += (
                    f"\nThe variables of {named(alive)} are kept, and cells run there: %%distributed --ranks "
                    f"{as_option(alive)}\nA value is brought by: %distributed pull NAME --ranks {alive[0]}\n"
                    "To start ranks without it, and lose all variables: %distributed stop\n"
                    f"%distributed {self.placing.without_lost}"
                )
            raise StartError(said) from None

    @property
    def why_it_failed(self) -> BaseException | None:
        """The error of its thread, if that has failed and ended all ranks; else None."""
        return self.loop.why_it_ended if self.loop.failure is not None else None

    def chosen(self, numbers: Sequence[int] | None) -> list[RankProxy]:
        """Return these ranks, or all for None."""
        self.check(numbers or ())
        wanted = range(self.size) if numbers is None else sorted(set(numbers))
        gone = [number for number in self.missing if number in wanted]
        if gone:
            what, alive = "it" if len(gone) == 1 else "them", self.alive
            only = f". On {named(alive)} only: --ranks {as_option(alive)}" if numbers is None and alive else ""
            raise PoolError(
                f"{self.how_they_ended(gone)}. To replace {what}, and go on: %distributed restart {gone[0]}{only}"
            )
        ranks = self.ranks
        return [ranks[number] for number in wanted]

    def how_it_ended(self, number: int) -> str:
        """Return how a rank has ended, in a few words."""
        rank = self.ranks.get(number)
        return f"rank {number} has ended" if rank is None or not rank.is_gone else how_it_ended(rank, _CELL)

    def how_they_ended(self, numbers: Iterable[int]) -> str:
        """Return how ranks have ended. Ranks that have ended in the same way are named together."""
        ways: dict[str, list[int]] = {}
        for number in numbers:
            ways.setdefault(self.how_it_ended(number).removeprefix(f"rank {number} "), []).append(number)
        several = {"is": "are", "was": "were", "has": "have"}
        for way, ranks in [*ways.items()]:
            if len(ranks) > 1:
                ways[re.sub(r"\b(?:is|was|has)\b", lambda verb: several[verb[0]], way, count=1)] = ways.pop(way)
        return "; ".join(f"{named(ranks)} {way}" for way, ranks in ways.items())

    def check(self, ranks: Sequence[int]) -> None:
        wrong = [rank for rank in ranks if not 0 <= rank < self.size]
        if wrong:
            raise ConfigError(
                f"there is no rank {wrong[0]}: the ranks that run are {', '.join(map(str, range(self.size)))}"
            )

    def request(self, ranks: Sequence[RankProxy], send: Callable[[RankProxy], object], **options: Any) -> Request:
        """Make a request that runs code of users; the arguments are those of `Request`."""
        request = Request(
            ranks=ranks,
            send=send,
            steps=cell_steps(self._timeouts(), self._cut),
            wording=_CELL,
            world_size=self.size,
            on_host=self.plan.kind.is_host,
            stuck=lambda: self.placing.check_ways(self.loop.say),
            **{"say": say_here(), **options},
        )

        def idle() -> list[RankProxy]:
            asked = {rank.rank for other in (request, *self.loop.requests) for rank in other.ranks}
            return [rank for number, rank in self.ranks.items() if number not in asked]

        request.idle = idle
        return request

    def _cut(self, rank: RankProxy) -> None:
        """Take a rank out of a collective, by breaking its connections to other ranks."""
        handles = [other.handle for other in self.ranks.values() if other is not rank]
        number = self._rendezvous_count

        def send(peers: tuple[int, ...], addresses: tuple[tuple[str, int], ...]) -> None:
            rank.handle.cut_off(CutOff(rendezvous=number, peers=peers, addresses=addresses))

        self.placing.when_addressed(handles, send)

    @explain_resource_errors()
    def bring_up(self, numbers: Sequence[int], interrupts: Interrupts) -> None:
        """Start these ranks, and connect all ranks by a process group. If that fails, the new ones are ended."""
        self.is_disconnected = True
        new: list[RankProxy] = []
        try:
            with (
                self.placing.meet() as rendezvous,
                pack_notebook(
                    inherits=not self.placing.is_elsewhere and self.plan.method.copies_notebook,
                    is_elsewhere=self.placing.is_elsewhere,
                    modules=self.placing.by_value,
                ) as notebook,
            ):
                self._start(numbers, new)

                def set_up(rank: RankProxy) -> None:
                    setup = self.placing.setup_of(rank.handle, self.plan, rendezvous, notebook.parcel)
                    rank.handle.send(replace(setup, store=None), notebook.fds)  # `Join` says it

                self._ask("setting the ranks up", new, set_up, interrupts, awaits=Awaits.READY)
                everybody = sorted(self.ranks.values(), key=lambda rank: rank.rank)
                self._rendezvous_count += 1
                number = self._rendezvous_count
                what = "the rendezvous of the ranks"
                devices = self._ask(what, everybody, lambda rank: send_join(rank, rendezvous, number), interrupts)
        except BaseException:
            self._end(new, seconds=0.0, interrupts=interrupts)
            raise
        for rank, device in zip(everybody, devices, strict=True):
            rank.device = device
            rank.steps = {}
            rank.has_joined = True
        self.is_disconnected = False

    def _start(self, numbers: Sequence[int], new: list[RankProxy]) -> None:
        """Have ranks forked, by a new server if the one before is gone; its ranks are then gone too."""
        try:
            self._fork(numbers, new)
        except StartError:
            if any(not rank.is_gone for rank in self.ranks.values()) or not self.placing.renew():
                raise
            self._fork(numbers[len(new) :], new)

    def _fork(self, numbers: Sequence[int], new: list[RankProxy]) -> None:
        with end_reports() as ends:
            for number in numbers:
                rank = RankProxy(self.placing.start(number, ends))
                self.loop.add(rank)
                new.append(rank)

    def _ask(
        self,
        what: str,
        ranks: Sequence[RankProxy],
        send: Callable[[RankProxy], None],
        interrupts: Interrupts,
        *,
        awaits: Awaits = Awaits.ANSWER,
    ) -> list[Any]:
        """Ask ranks what they do while they are started and connected, and return the answers, in their order."""
        timeouts = self._timeouts()
        request = Request(
            ranks=ranks,
            send=send,
            # No code of users runs, so nothing is waited for.
            steps=cell_steps(replace(timeouts, wait=timeouts.rendezvous, save=0.0), self._cut),
            wording=replace(_CELL, what=what),
            world_size=self.size,
            start=timeouts.start,
            say=say_here(),
            awaits=awaits,
        )
        with interrupts.go_to(lambda: self.loop.interrupt(request)):
            self.loop.begin(request)
            self.loop.wait_for(request)
        return result_of(request)

    def remove(self, number: int, interrupts: Interrupts) -> None:
        """Kill a rank, if it lives, and close it."""
        rank = self.ranks.get(number)
        if rank is not None:
            self._end([rank], seconds=0.0, interrupts=interrupts)
            self.loop.remove(rank)

    def close(self, interrupts: Interrupts, *, ask: bool) -> None:
        """End every rank, the thread and the server. Can be repeated if an exception broke it off.

        Args:
            interrupts: at one that comes meanwhile ranks are killed, and machines that are silent are not waited for.
            ask: whether ranks are idle, so that they can be told to end by themselves.
        """
        seconds = self._timeouts().quit if ask else 0.0
        self._end([*self.ranks.values()], seconds=seconds, interrupts=interrupts)
        with interrupts.go_to(self.placing.give_up):
            self.loop.close()
            if self.loop.output is not None:
                self.loop.output.close()
            self.placing.close()

    def _end(self, ranks: Sequence[RankProxy], *, seconds: float, interrupts: Interrupts) -> None:
        alive = [rank for rank in ranks if not rank.handle.ended]
        for rank in alive:
            rank.why_lost = ""  # its process may live, and is waited for

        def send(rank: RankProxy) -> None:
            if seconds:
                rank.quit()
            rank.is_leaving = True

        timeouts = replace(self._timeouts(), save=0.0) if self.missing else self._timeouts()  # a save needs all ranks
        steps = stop_steps(timeouts, seconds=seconds)
        request = Request(ranks=alive, send=send, steps=steps, wording=_CELL, awaits=Awaits.END, world_size=self.size)

        def hurry() -> None:
            self.loop.interrupt(request)
            self.placing.give_up()

        with interrupts.go_to(hurry):
            self.loop.begin(request)
            wait(request.done)

    def _on_rank_end(self, rank: RankProxy) -> None:
        if not rank.is_leaving:
            self._tell(death(rank, _CELL))


def send_join(rank: RankProxy, rendezvous: Rendezvous, number: int) -> None:
    """Send a rank the `Join` that has it enter a new process group."""
    with contextlib.ExitStack() as sent:
        store, store_fd = rendezvous.store_for(rank.rank)
        if store_fd >= 0:
            sent.callback(os.close, store_fd)
        fds = () if store_fd == -1 else (store_fd,)
        environ = {
            "MASTER_ADDR": rendezvous.address,
            "MASTER_PORT": str(rendezvous.port),
            "TORCHELASTIC_RUN_ID": rendezvous.run_id,
        }
        rank.handle.ask(Join(rendezvous=number, environ=environ, store=store), fds)


def result_of(request: Request) -> list[Any]:
    """Return the values that the ranks of a request have answered with, in their order, and close the request."""
    try:
        error = error_of(request)
        if error is not None:
            raise error
        return [
            unpack(answer.parcel, request.take(rank)[1])
            for rank, (answer, _) in sorted(request.answers.items())
            if isinstance(answer, Result) and (answer.parcel.pickled or answer.parcel.sizes)
        ]
    finally:
        request.close()


def breaks_group(request: Request, ranks: Mapping[int, RankProxy], backend: str) -> bool:
    """Return whether the process group is of no use after a cell."""
    if len(ranks) == 1:
        return False
    # A rank has been in more collectives of a group than another. Groups that a rank is not in do not count.
    counts: dict[str, set[int]] = {}
    for rank in ranks.values():
        for group, steps in rank.steps.items():
            counts.setdefault(group, set()).add(steps)
    is_out_of_step = any(len(steps) > 1 for steps in counts.values())
    if request.incidents:
        return StepKind.CUT in request.steps_taken or is_out_of_step
    # A collective of nccl returns before other ranks have joined it, so the cell may end well although they never do.
    return is_out_of_step and len(request.ranks) == len(ranks) and backend_named(backend).returns_early
