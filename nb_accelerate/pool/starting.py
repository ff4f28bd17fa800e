"""How ranks of a pool come to be, and where they meet."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError, PoolError
from nb_accelerate.launch.environ import rank_environ, working_directory
from nb_accelerate.launch.launch import notebook_sources
from nb_accelerate.launch.local import RankHandle
from nb_accelerate.launch.machine import look
from nb_accelerate.launch.plan import make_plan
from nb_accelerate.protocol.messages import Join, Setup
from nb_accelerate.protocol.shipping import pack

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nb_accelerate.config.launch import LaunchOptions
    from nb_accelerate.launch.plan import LaunchPlan
    from nb_accelerate.launch.rendezvous import Meeting
    from nb_accelerate.launch.servers import RankServer
    from nb_accelerate.pool.options import PoolOptions
    from nb_accelerate.ranks.proxy import Member

WITHOUT_GPUS = 2
"""Ranks on a machine without GPUs: enough to see that a program is distributed."""


def plan_pool(options: PoolOptions) -> tuple[LaunchOptions, LaunchPlan]:
    """Decide how many ranks on what.

    Raises:
        PoolError: this is a rank itself.
        ConfigError: more ranks than GPUs, or a GPU that is not there.
        MissingDependencyError: torch is not installed.
    """
    ipython = sys.modules.get("IPython")
    if ipython is not None and getattr(ipython.get_ipython(), "is_rank", False):
        raise PoolError("this runs on a rank already: ranks that stay are started in the notebook")
    facts = look(options.env)
    number = options.num_processes
    launch = options.as_launch(number)
    _check_number(launch.num_processes or 1)
    plan = make_plan(launch, facts, may_copy=False)
    if number is None and plan.kind.is_host:
        launch = replace(launch, num_processes=WITHOUT_GPUS)
        plan = make_plan(launch, facts, may_copy=False)
    return launch, plan


def _check_number(ranks: int) -> None:
    """Is it a slip of the fingers? Every rank is a process with PyTorch in it."""
    most = max(64, 4 * (os.cpu_count() or 1))
    if ranks > most:
        raise ConfigError(
            f"-n {ranks}: that many processes are more than this machine can hold. Write at most -n {most}"
        )


def start_rank(server: RankServer, rank: int) -> RankHandle:
    """Have a rank forked; it waits for its `Setup`.

    Raises:
        StartError: the server is gone.
    """
    handle = RankHandle(rank, local_rank=rank)
    try:
        server.start([handle])
    except BaseException:
        handle.close()
        raise
    return handle


def send_setup(members: Iterable[Member], options: LaunchOptions, plan: LaunchPlan, meeting: Meeting) -> None:
    """Tell new ranks what they are."""
    with pack(notebook_sources()) as sources:
        for member in members:
            setup = Setup(
                rank=member.rank,
                environ=rank_environ(plan, meeting, member.rank, base=dict(os.environ), extra=options.env),
                cwd=working_directory(),
                sys_path=tuple(sys.path),
                argv=tuple(sys.argv),
                num_threads=plan.num_threads,
                sources=sources.parcel,
            )
            with contextlib.suppress(OSError):  # it has ended already, which its status pipe tells
                member.handle.channel.send(setup, sources.fds)


def send_join(member: Member, meeting: Meeting, number: int) -> None:
    """Tell a rank where the others are."""
    alarm = member.take_alarm()
    store, store_fd = meeting.store_for(member.rank)
    message = Join(
        meeting=number,
        environ={
            "MASTER_ADDR": meeting.address,
            "MASTER_PORT": str(meeting.port),
            "TORCHELASTIC_RUN_ID": meeting.run_id,
        },
        has_alarm=alarm is not None,
        store=store,
    )
    fds = [] if alarm is None else [alarm.fileno()]
    if store_fd >= 0:
        fds.append(store_fd)
    with contextlib.suppress(OSError):  # as above
        member.handle.ask(message, fds)
    if alarm is not None:
        alarm.close()
    if store_fd >= 0:
        os.close(store_fd)
