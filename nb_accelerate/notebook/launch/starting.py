"""Start the ranks of a launch."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from nb_accelerate.notebook.launch.local import LocalRank
from nb_accelerate.notebook.launch.rendezvous import is_local
from nb_accelerate.notebook.protocol.interrupts import interrupts_later
from nb_accelerate.notebook.ranks.end_reports import end_reports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.launch.rendezvous import Rendezvous
    from nb_accelerate.notebook.launch.servers import RankServer
    from nb_accelerate.notebook.ranks.end_reports import EndReports


@contextlib.contextmanager
def started_ranks(
    server: RankServer, options: LaunchOptions, plan: LaunchPlan, rendezvous: Rendezvous, *, wants_rows: bool
) -> Iterator[list[LocalRank]]:
    """Start the ranks of this machine, which wait for `Setup`, and yield a handle for each, by local rank.

    When the block is left, ranks still alive are killed and all handles closed.
    """
    handles: list[LocalRank] = []
    with contextlib.ExitStack() as stack:
        if not is_local(options):
            stack.callback(server.forget)

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
            server.start(new_handles(ends))
        yield handles
