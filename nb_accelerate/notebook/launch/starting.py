"""Start the ranks of a launch, and send them what they need and what they run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from nb_accelerate.notebook.launch.local import LocalRank
from nb_accelerate.notebook.launch.rendezvous import is_local
from nb_accelerate.notebook.launch.setup import make_setup
from nb_accelerate.notebook.protocol.interrupts import interrupts_later
from nb_accelerate.notebook.protocol.messages import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.launch.rendezvous import Rendezvous
    from nb_accelerate.notebook.launch.servers import RankServer
    from nb_accelerate.notebook.protocol.messages import StoreSpec
    from nb_accelerate.notebook.protocol.shipping import Packed
    from nb_accelerate.notebook.ranks.proxy import RankProxy


@contextlib.contextmanager
def started_ranks(
    server: RankServer,
    options: LaunchOptions,
    plan: LaunchPlan,
    rendezvous: Rendezvous,
    *,
    wants_rows: bool,
    births: contextlib.ExitStack,
) -> Iterator[tuple[list[LocalRank], list[StoreSpec]]]:
    """Start the ranks of this machine. When the block is left, those that live are killed and their handles closed.

    Args:
        wants_rows: whether a panel shows their progress bars as rows.
        births: closed when all of them are on their way.

    Yields:
        A handle for each rank, and the store that each is to use; by local rank. The ranks wait for `Setup`.
    """
    stores: list[StoreSpec] = []
    handles: list[LocalRank] = []
    with contextlib.ExitStack() as stack:
        if not is_local(options):
            stack.callback(server.forget)

        def new_handles() -> Iterator[LocalRank]:
            for local_rank in range(plan.num_processes):
                rank = plan.topology_of(local_rank, node_rank=rendezvous.node_rank).rank
                with interrupts_later():  # or nobody would close what was just opened
                    store, store_fd = rendezvous.store_for(local_rank)
                    stores.append(store)
                    handle = LocalRank(rank, local_rank=local_rank, store_fd=store_fd)
                    stack.callback(handle.close)
                    stack.callback(handle.kill)
                handle.page.want_rows(wants_rows)
                handles.append(handle)
                yield handle

        server.start(new_handles())
        births.close()
        yield handles, stores


def sender(
    options: LaunchOptions,
    plan: LaunchPlan,
    rendezvous: Rendezvous,
    stores: Sequence[StoreSpec],
    notebook: Packed,
    call: Packed | None,
    attempt: int,
) -> Callable[[RankProxy], None]:
    """Return a function that sends a rank its `Setup` and its `Call`.

    Args:
        stores: the store that each is to use, by local rank.
        notebook: of `pack_notebook`.
        call: the function with its arguments; None if ranks have it in memory.
    """

    def send(rank: RankProxy) -> None:
        handle = rank.handle
        store = stores[handle.local_rank]
        setup = make_setup(handle, options, plan, rendezvous, notebook.parcel, store=store, attempt=attempt)
        with contextlib.suppress(OSError):  # it has ended already, which its status tells
            handle.channel.send(setup, notebook.fds)
            handle.ask(Call(parcel=call.parcel if call else None), call.fds if call else ())

    return send
