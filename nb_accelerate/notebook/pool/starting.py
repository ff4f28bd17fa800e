"""Plan and start the ranks of a pool, and send them the messages that set them up."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from nb_accelerate.errors import PoolError
from nb_accelerate.notebook.launch.local import LocalRank
from nb_accelerate.notebook.launch.machine import facts_here
from nb_accelerate.notebook.launch.plan import make_plan
from nb_accelerate.notebook.launch.setup import make_setup
from nb_accelerate.notebook.protocol.messages import Join

if TYPE_CHECKING:
    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.launch.rendezvous import Rendezvous
    from nb_accelerate.notebook.launch.servers import RankServer
    from nb_accelerate.notebook.pool.options import PoolOptions
    from nb_accelerate.notebook.pool.rank import PoolRank
    from nb_accelerate.notebook.protocol.shipping import Packed

RANKS_WITHOUT_GPUS = 2
"""Ranks on a machine without GPUs: enough to see that a program is distributed."""


def plan_pool(options: PoolOptions) -> tuple[LaunchOptions, LaunchPlan]:
    """Decide how many ranks are started on which devices.

    Returns:
        The options and the plan of a launch with these ranks.
    """
    ipython = sys.modules.get("IPython")
    if ipython is not None and getattr(ipython.get_ipython(), "is_rank", False):
        raise PoolError("this runs on a rank already: ranks that stay are started in the notebook")
    facts = facts_here(options.env)
    number = options.num_processes
    launch = options.as_launch(number)
    plan = make_plan(launch, facts, may_copy=False)
    if number is None and plan.kind.is_host:
        launch = replace(launch, num_processes=RANKS_WITHOUT_GPUS)
        plan = make_plan(launch, facts, may_copy=False)
    return launch, plan


def start_rank(server: RankServer, rank: int) -> LocalRank:
    """Have a server start a rank, which then waits for its `Setup`.

    Raises:
        StartError: the server is gone.
    """
    handle = LocalRank(rank, local_rank=rank)
    try:
        server.start([handle])
    except BaseException:
        handle.close()
        raise
    return handle


def send_setup(
    rank: PoolRank, options: LaunchOptions, plan: LaunchPlan, rendezvous: Rendezvous, notebook: Packed
) -> None:
    """Send a new rank its `Setup`."""
    setup = make_setup(rank.handle, options, plan, rendezvous, notebook.parcel)
    with contextlib.suppress(OSError):  # it has ended already, which its status tells
        rank.handle.channel.send(setup, notebook.fds)


def send_join(rank: PoolRank, rendezvous: Rendezvous, number: int) -> None:
    """Send a rank the `Join` that has it enter a new process group."""
    alarm = rank.take_alarm()
    store, store_fd = rendezvous.store_for(rank.rank)
    message = Join(
        rendezvous=number,
        environ={
            "MASTER_ADDR": rendezvous.address,
            "MASTER_PORT": str(rendezvous.port),
            "TORCHELASTIC_RUN_ID": rendezvous.run_id,
        },
        has_alarm=alarm is not None,
        store=store,
    )
    fds = [] if alarm is None else [alarm.fileno()]
    if store_fd >= 0:
        fds.append(store_fd)
    with contextlib.suppress(OSError):  # it has ended already, which its status tells
        rank.handle.ask(message, fds)
    if alarm is not None:
        alarm.close()
    if store_fd >= 0:
        os.close(store_fd)
