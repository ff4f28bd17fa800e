"""What `nb-accelerate launch` would start, for ``--dry_run``."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from nb_accelerate.base.devices import DEVICE_KINDS
from nb_accelerate.notebook.launch.environ import rank_environ
from nb_accelerate.notebook.launch.machine import VisibleDevices, facts_here
from nb_accelerate.notebook.launch.plan import make_plan
from nb_accelerate.notebook.launch.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.launch.machine import MachineFacts
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.worker.script import Job


def describe(job: Job, options: LaunchOptions, *, wants_gpus: bool) -> Iterator[str]:
    """Print what `run` would start, and start nothing.

    Args:
        wants_gpus: GPUs were asked for; where none is visible the lines are those of a machine that has enough.
    """
    facts = facts_here(options.env)
    if wants_gpus and not facts.num_gpus:
        number = options.num_processes or 1
        yield f"# no GPU is visible here; on a machine with {number} GPU{'s' if number > 1 else ''}:"
        facts = _with_gpus(facts, options)
    plan = make_plan(options, facts, may_copy=False)
    yield f"# {plan.describe()}"
    for local_rank in range(plan.num_processes):
        changed = _changed_environ(plan, options, local_rank)
        yield " ".join(
            ("env", *(f"{name}={shlex.quote(value)}" for name, value in changed), *map(shlex.quote, job.command))
        )


def _with_gpus(facts: MachineFacts, options: LaunchOptions) -> MachineFacts:
    numbers = () if options.devices is None or isinstance(options.devices, str) else options.devices
    number = max((options.num_processes or 1), *(device + 1 for device in numbers), 1)
    gpus = VisibleDevices(kind=DEVICE_KINDS[0], names=tuple(map(str, range(number))))
    return replace(facts, accelerators=(gpus,), prefers_cpu=False)


def _changed_environ(plan: LaunchPlan, options: LaunchOptions, local_rank: int) -> list[tuple[str, str]]:
    """Variables of a rank that is started by hand: then rank 0 serves the store by itself, and others look for it."""
    several = plan.num_nodes > 1
    rendezvous = Rendezvous(
        address=options.master_addr,
        port=int(options.use_port or (29500 if several else 0)),
        node_rank=options.node_rank,
        interface="INTERFACE" if several else plan.loopback,
        run_id=options.rdzv_id,
        listener=None,
        keeps_interface=several,
    )
    environ = rank_environ(plan, rendezvous, local_rank, base=os.environ, extra=options.env)
    if not rendezvous.port:
        environ["MASTER_PORT"] = "FREE_PORT"
    return sorted((name, value) for name, value in environ.items() if os.environ.get(name) != value)
