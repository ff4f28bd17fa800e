"""Where the ranks of a launch are: on this machine, or on those of a `Cluster`. It starts them, and sets them up."""

from __future__ import annotations

import contextlib
import pkgutil
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.base.config.env import Environment
from nb_accelerate.notebook.launch.forked_server import ForkedServer
from nb_accelerate.notebook.launch.local import LocalRank
from nb_accelerate.notebook.launch.rendezvous import is_local, open_rendezvous, repeated_rendezvous
from nb_accelerate.notebook.launch.servers import (
    ExecutedServer,
    new_warm_server,
    one_at_a_time,
    retire_warm_server,
    warm_server,
)
from nb_accelerate.notebook.launch.setup import make_setup
from nb_accelerate.notebook.protocol.interrupts import interrupts_later
from nb_accelerate.notebook.ranks.end_reports import end_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.launch.rendezvous import Meet, Rendezvous
    from nb_accelerate.notebook.launch.servers import RankServer
    from nb_accelerate.notebook.protocol.messages import Parcel, Setup
    from nb_accelerate.notebook.ranks.end_reports import EndReports
    from nb_accelerate.notebook.ranks.handle import RankHandle


class Placing(ABC):
    """Starts the ranks of a launch, as often as it is told to, or those of a pool, one by one."""

    is_elsewhere = False  # whether ranks are on machines of an engine
    lost = ""  # which machines are lost, and why
    without_lost = ""  # how ranks are started on the others, as it is written behind ``%distributed``
    by_value: Sequence[ModuleType] = ()  # modules that are sent, since a machine does not have them as they are here

    @abstractmethod
    def repeated_rendezvous(self, check: Callable[[], object]) -> contextlib.AbstractContextManager[Meet]:
        """Return a context manager with what is called at each start of the ranks, and agrees where they meet.

        Args:
            check: is called while machines are waited for; what it raises ends the wait.
        """

    @abstractmethod
    def started_ranks(
        self, plan: LaunchPlan, rendezvous: Rendezvous, *, wants_rows: bool
    ) -> contextlib.AbstractContextManager[Sequence[RankHandle]]:
        """Start the ranks, which wait for `Setup`, and yield their handles. Ranks still alive at the end are killed."""

    @abstractmethod
    def setup_of(
        self, handle: RankHandle, plan: LaunchPlan, rendezvous: Rendezvous, notebook: Parcel, *, attempt: int = 0
    ) -> Setup:
        """Return the `Setup` of a rank that was started."""

    @abstractmethod
    def close(self) -> None:
        """End what belongs to this launch. Can be repeated."""

    def check_ways(self, say: Callable[[str], object]) -> None:  # noqa: B027 - on one machine there is none
        """Say whether a machine no longer reaches another one. Returns at once; called when ranks wait for others."""

    def while_starting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    # Used by pools.

    @abstractmethod
    def meet(self) -> contextlib.AbstractContextManager[Rendezvous]:
        """Return a context manager that agrees where ranks meet once."""

    @abstractmethod
    def start(self, rank: int, ends: EndReports) -> RankHandle:
        """Start a rank, which waits for `Setup`."""

    @abstractmethod
    def when_addressed(
        self, handles: Sequence[RankHandle], then: Callable[[tuple[int, ...], tuple[tuple[str, int], ...]], object]
    ) -> None:
        """Call `then` with process ids of ranks, or their addresses and ports, so that others can be cut off them."""

    def renew(self) -> bool:
        """Replace what starts ranks, which has ended with all of them. Return whether there is something new."""
        return False

    def reopen(self) -> None:  # noqa: B027 - this machine is not lost
        """Start the hosts of lost machines again. An interrupt ends the wait for them."""

    def give_up(self) -> None:  # noqa: B027
        """Wait no longer for machines that are silent."""


class PlacingHere(Placing):
    """Starts ranks on this machine, by a server of the plan's start method."""

    def __init__(self, options: LaunchOptions, plan: LaunchPlan) -> None:
        self._options = options
        self._plan = plan
        self._resources = contextlib.ExitStack()
        self._server: RankServer
        self.renew()

    @override
    def renew(self) -> bool:
        self._resources.close()
        self._server = self._resources.enter_context(pkgutil.resolve_name(self._plan.method.starter)(self._options))
        return True

    @override
    def close(self) -> None:  # a server that is kept for the next launch stays
        self._resources.close()

    @override
    def repeated_rendezvous(self, check: Callable[[], object]) -> contextlib.AbstractContextManager[Meet]:
        return repeated_rendezvous(self._options, self._plan, check)

    @override
    @contextlib.contextmanager
    def started_ranks(
        self, plan: LaunchPlan, rendezvous: Rendezvous, *, wants_rows: bool
    ) -> Iterator[Sequence[RankHandle]]:
        handles: list[LocalRank] = []
        with contextlib.ExitStack() as stack:
            if not is_local(self._options):
                stack.callback(self._server.forget)

            def new_handles(ends: EndReports) -> Iterator[LocalRank]:
                for local_rank in range(plan.num_processes):
                    rank = plan.topology_of(local_rank, node_rank=rendezvous.node_rank).rank
                    with interrupts_later():  # or nobody would close what was just opened
                        store, store_fd = rendezvous.store_for(local_rank)
                        handle = LocalRank(rank, local_rank=local_rank, ends=ends, store=store, store_fd=store_fd)
                        stack.callback(handle.close)
                        stack.callback(handle.kill)
                    handle.page.want_rows(wants_rows)
                    handles.append(handle)
                    yield handle

            with end_reports() as ends:
                self._server.start(new_handles(ends))
            yield handles

    @override
    def setup_of(
        self, handle: RankHandle, plan: LaunchPlan, rendezvous: Rendezvous, notebook: Parcel, *, attempt: int = 0
    ) -> Setup:
        store = handle.store if isinstance(handle, LocalRank) else None
        return make_setup(handle, self._options, plan, rendezvous, notebook, store=store, attempt=attempt)

    @override
    @contextlib.contextmanager
    def while_starting(self) -> Iterator[None]:
        with one_at_a_time() if is_local(self._options) else contextlib.nullcontext():
            yield

    @override
    def meet(self) -> contextlib.AbstractContextManager[Rendezvous]:
        return open_rendezvous(self._options, self._plan)

    @override
    def start(self, rank: int, ends: EndReports) -> RankHandle:
        handle = LocalRank(rank, local_rank=rank, ends=ends)
        try:
            self._server.start([handle])
        except BaseException:
            handle.close()
            raise
        return handle

    @override
    def when_addressed(
        self, handles: Sequence[RankHandle], then: Callable[[tuple[int, ...], tuple[tuple[str, int], ...]], object]
    ) -> None:
        then(tuple(handle.pid for handle in handles if handle.pid and not handle.ended), ())


@contextlib.contextmanager
def forkserver(_: LaunchOptions) -> Iterator[RankServer]:
    """Start ranks as forks of a fresh process with torch imported, which is kept for the next launch."""
    if not Environment().keep_warm:
        with contextlib.closing(new_warm_server()) as server:
            yield server
        return
    try:
        yield warm_server()
    finally:
        retire_warm_server()  # unless it can be used again


def spawn(_: LaunchOptions) -> contextlib.AbstractContextManager[RankServer]:
    """Start ranks as fresh interpreters."""
    return contextlib.closing(ExecutedServer((), fresh=True))


def fork(options: LaunchOptions) -> contextlib.AbstractContextManager[RankServer]:
    """Start ranks as forks of this process, with the function and its arguments in memory."""
    return contextlib.closing(ForkedServer((options.function, options.args, dict(options.kwargs))))
