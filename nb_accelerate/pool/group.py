"""The ranks of a pool as a group: they are started, meet, meet again, are replaced, and end.

::

    start --> Setup --> Join, all of them --+--> in one process group
                          ^                 |
                          +-- meet again <--+--> a rank is lost --> a new one in its place --> Setup --> Join, all

New ranks are expendable: one that does not come is killed. Those that have variables are taken out of the meeting,
and killed only if that does not work: nothing that happens while ranks meet is waited for without a deadline.
"""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ConfigError, PoolError, StartError
from nb_accelerate.launch.rendezvous import meet
from nb_accelerate.launch.starters import open_server
from nb_accelerate.pool.outcome import death, result_of
from nb_accelerate.pool.starting import send_join, send_setup, start_rank
from nb_accelerate.protocol.messages import Quit
from nb_accelerate.ranks.loop import Crew
from nb_accelerate.ranks.request import Patience, Turn
from nb_accelerate.ranks.waiting import Interrupts, wait_for
from nb_accelerate.worker.limits import enough_room

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nb_accelerate.config.launch import LaunchOptions
    from nb_accelerate.launch.local import RankHandle
    from nb_accelerate.launch.plan import LaunchPlan
    from nb_accelerate.ranks.proxy import Member

_START = 120.0
"""Seconds until every rank is there; importing torch from a slow disk is the longest part of it."""

_PATIENCE = Patience(wait=10.0)
"""While ranks are set up and meet. No code of users' runs then."""

_QUIT = 5.0
"""Seconds for exit handlers of users and libraries."""


class RankGroup:
    """Owns the ranks, the thread that listens to them, and the server they are forked from. `close` it.

    An interrupt is to be kept while it is made: see `Interrupts`.

    Args:
        options: of the launch.
        plan: how many ranks on what.
        on_loss: called, in the crew's thread, with what happened when a rank has ended.

    Attributes:
        plan: as given.
        crew: the ranks that were started.
    """

    @enough_room()
    def __init__(self, options: LaunchOptions, plan: LaunchPlan, on_loss: Callable[[BaseException], None]) -> None:
        self.plan = plan
        self._options = options
        self._tell = on_loss
        self._meetings = 0
        self._resources = contextlib.ExitStack()
        self._server = self._resources.enter_context(open_server(plan.method, options))
        try:
            self.crew = Crew(self._on_loss)
        except BaseException:
            self._resources.close()
            raise

    @property
    def size(self) -> int:
        """Number of ranks, also of those that have ended."""
        return self.plan.num_processes

    @property
    def members(self) -> Mapping[int, Member]:
        """Ranks that were not removed, by their number."""
        return self.crew.members

    @property
    def missing(self) -> list[int]:
        """Ranks that have ended."""
        return [rank for rank in range(self.size) if rank not in self.members or self.members[rank].is_gone]

    @property
    def why_it_failed(self) -> BaseException | None:
        """Why its thread has ended before its time, with all ranks."""
        return self.crew.why_it_ended if self.crew.failure is not None else None

    def chosen(self, ranks: Sequence[int] | None) -> list[Member]:
        """These ranks, or all.

        Raises:
            ConfigError: there is no such rank.
            PoolError: one of them has ended.
        """
        self.check(ranks or ())
        wanted = range(self.size) if ranks is None else sorted(set(ranks))
        gone = [rank for rank in self.missing if rank in wanted]
        if gone:
            why = "; ".join(map(self.how_it_ended, gone))
            raise PoolError(f"{why}. To replace it, and go on: %distributed restart {gone[0]}")
        return [self.members[rank] for rank in wanted]

    def how_it_ended(self, rank: int) -> str:
        """Of a rank that has."""
        member = self.members.get(rank)
        if member is None or not member.is_gone:
            return f"rank {rank} has ended"
        return str(death(member, "")).split(". ", maxsplit=1)[0]

    def check(self, ranks: Sequence[int]) -> None:
        """Are there such ranks?

        Raises:
            ConfigError: no.
        """
        wrong = [rank for rank in ranks if not 0 <= rank < self.size]
        if wrong:
            raise ConfigError(
                f"there is no rank {wrong[0]}: the ranks that run are {', '.join(map(str, range(self.size)))}"
            )

    def turn(
        self,
        members: Sequence[Member],
        send: Callable[[Member], None],
        *,
        timeout: float | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Turn:
        """Something to ask of ranks; see `Turn`."""
        pids = [one.handle.pid for one in self.members.values() if one.handle.pid and not one.is_gone]
        return Turn(
            members=members,
            send=send,
            fellows=pids,
            meeting=self._meetings,
            world_size=self.size,
            timeout=timeout,
            say=say,
        )

    def ask(self, turn: Turn, interrupts: Interrupts) -> list[Any]:
        """Wait for the answers; gives them in the order of the ranks.

        Raises:
            BaseException: the first cause, if it went wrong.
        """
        with interrupts.go_to(lambda: self.crew.interrupt(turn)):
            self.crew.begin(turn)
            wait_for(self.crew, turn)
        return result_of(turn)

    @enough_room()
    def bring_up(self, ranks: Sequence[int], interrupts: Interrupts) -> None:
        """Start these ranks, and have all of them meet. If that goes wrong, those that are new are ended.

        Raises:
            StartError: a rank could not be started.
            DeadlineError: it took too long.
            BaseException: a rank could not be set up, or did not meet the others.
        """
        new: list[Member] = []
        try:
            with meet(self._options, self.plan) as meeting:
                new.extend(self.crew.add(self._start(rank)) for rank in ranks)

                def set_up(member: Member) -> None:
                    send_setup([member], self._options, self.plan, meeting)

                self._have_done("setting the ranks up", new, set_up, ranks, interrupts)
                everybody = sorted(self.members.values(), key=lambda one: one.rank)
                self._meetings += 1

                def join(member: Member) -> None:
                    send_join(member, meeting, self._meetings)

                devices = self._have_done("the meeting of the ranks", everybody, join, ranks, interrupts)
        except BaseException:
            self._end(new, ask=False, interrupts=interrupts)
            raise
        for member, device in zip(everybody, devices, strict=True):
            member.device = device
            member.steps = {}

    def _start(self, rank: int) -> RankHandle:
        """Have a rank forked, by a new server if the one before is gone; its ranks are then gone too."""
        try:
            return start_rank(self._server, rank)
        except StartError:
            if any(not member.is_gone for member in self.members.values()):
                raise
        self._resources.close()
        self._server = self._resources.enter_context(open_server(self.plan.method, self._options))
        return start_rank(self._server, rank)

    def _have_done(
        self,
        what: str,
        members: Sequence[Member],
        send: Callable[[Member], None],
        new: Sequence[int],
        interrupts: Interrupts,
    ) -> list[Any]:
        turn = self.turn(members, send, timeout=_START)
        turn.what, turn.expendable, turn.patience = what, new, _PATIENCE
        return self.ask(turn, interrupts)

    def remove(self, rank: int, interrupts: Interrupts) -> None:
        """Kill a rank, if it lives, and forget it."""
        member = self.members.get(rank)
        if member is not None:
            self._end([member], ask=False, interrupts=interrupts)
            self.crew.remove(member)

    def close(self, interrupts: Interrupts, *, ask: bool) -> None:
        """End every rank; nothing is left. Can be repeated if it did not come to its end.

        Args:
            interrupts: do not wait for exit handlers when one comes.
            ask: they are idle, so they get the time to end by themselves.
        """
        self._end([*self.members.values()], ask=ask, interrupts=interrupts)
        self.crew.close()
        self._resources.close()

    def _end(self, members: Sequence[Member], *, ask: bool, interrupts: Interrupts) -> None:
        alive = [member for member in members if not member.handle.ended]
        for member in alive:
            member.is_leaving = True
        if ask:
            for member in alive:
                with contextlib.suppress(OSError):  # it has just ended, which its status pipe tells
                    member.handle.channel.send(Quit())
            if self.crew.wait_for_end(alive, _QUIT, interrupts):
                return
        for member in alive:
            member.handle.signal(signal.SIGKILL)
        self.crew.wait_for_end(alive, _QUIT, Interrupts())

    def _on_loss(self, member: Member) -> None:
        """In the crew's thread: a rank has ended."""
        if not member.is_leaving:
            self._tell(death(member, ""))
