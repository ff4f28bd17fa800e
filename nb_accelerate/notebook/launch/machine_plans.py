"""Plan the ranks of several machines, by what the host of each has said about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.devices import DEVICE_KINDS
from nb_accelerate.base.topology import Topology
from nb_accelerate.errors import ConfigError, StartError
from nb_accelerate.notebook.launch.environ import variables_of_file
from nb_accelerate.notebook.launch.machine import MachineFacts, VisibleDevices
from nb_accelerate.notebook.launch.plan import LaunchPlan, make_plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.launch.engines.engine import Machine


@dataclass(frozen=True, kw_only=True)
class MachinePlan(LaunchPlan):
    """The plan of one machine among several, each with ranks of its own number."""

    first_rank: int = 0
    all_ranks: int = 1
    number: int = 0
    num_machines: int = 1

    @override
    def topology_of(self, local_rank: int, *, node_rank: int = 0) -> Topology:
        return Topology(
            rank=self.first_rank + local_rank,
            local_rank=local_rank,
            node_rank=self.number,
            world_size=self.all_ranks,
            local_world_size=self.num_processes,
            num_nodes=self.num_machines,
        )


def plan_machines(
    options: LaunchOptions, machines: Sequence[Machine], hellos: Sequence[Mapping[str, Any]]
) -> tuple[list[MachinePlan], LaunchPlan]:
    """Return the plan of each machine, and one of all ranks together.

    Args:
        hellos: what the host of each machine has said.

    Raises:
        ConfigError: they cannot have the ranks that were asked for.
        StartError: a machine cannot have any.
    """
    said = Environment({**variables_of_file(options.env), **options.env}).use_cpu
    facts = [_facts(*one, prefers_cpu=said) for one in zip(machines, hellos, strict=True)]
    counts = _counts(options, machines, facts)
    plans: list[LaunchPlan] = []
    for machine, fact, count in zip(machines, facts, counts, strict=True):
        try:
            plan = make_plan(replace(options, num_processes=count), fact, may_copy=False)
        except ConfigError as error:
            raise ConfigError(f"machine {machine.name}: {error}") from error
        plans.append(replace(plan, warnings=tuple(f"{machine.name}: {line}" for line in plan.warnings)))
    if len({plan.kind.name for plan in plans}) > 1:
        has = ", ".join(f"{machine.name}: {plan.device}" for machine, plan in zip(machines, plans, strict=True))
        raise ConfigError(f"the machines have different types of device ({has}). Write devices='cpu'")
    whole = replace(
        plans[0],
        num_processes=sum(counts),
        machines=tuple(machine.name for machine in machines),
        warnings=tuple(line for plan in plans for line in plan.warnings),
    )
    of_machines = [
        MachinePlan(
            **vars(plan),
            first_rank=sum(counts[:number]),
            all_ranks=sum(counts),
            number=number,
            num_machines=len(plans),
        )
        for number, plan in enumerate(plans)
    ]
    return of_machines, whole


def _facts(machine: Machine, hello: Mapping[str, Any], *, prefers_cpu: bool | None) -> MachineFacts:
    if "error" in hello:
        raise StartError(f"machine {machine.name}: {hello['error']}")
    kinds = {kind.name: kind for kind in DEVICE_KINDS}
    return MachineFacts(
        num_cpus=hello["num_cpus"],
        accelerators=tuple(
            VisibleDevices(kind=kinds[name], names=tuple(names)) for name, names in hello["devices"].items()
        ),
        prefers_cpu=hello["prefers_cpu"] if prefers_cpu is None else prefers_cpu,
        num_threads=hello["num_threads"],
        loopback=hello["loopback"],
        shared_memory=hello["shared_memory"],
    )


def _counts(options: LaunchOptions, machines: Sequence[Machine], facts: Sequence[MachineFacts]) -> list[int]:
    """Return how many ranks each machine has.

    Raises:
        ConfigError: these numbers do not make up what the launch asks for.
    """
    known = [machine.num_ranks for machine in machines]
    total = options.num_processes
    open_ones = known.count(None)
    if total is None:
        return [max(1, fact.num_gpus) if count is None else count for count, fact in zip(known, facts, strict=True)]
    rest = total - sum(count or 0 for count in known)
    if (open_ones == 0 and rest) or (open_ones and (rest < open_ones or rest % open_ones)):
        said = ", ".join(
            machine.name if machine.num_ranks is None else f"{machine.name}:{machine.num_ranks}" for machine in machines
        )
        raise ConfigError(
            f"num_processes={total} is the number of ranks on all machines together, and cannot be had on {said}. "
            "Leave num_processes out, and write in hosts how many ranks each machine has"
        )
    return [rest // open_ones if count is None else count for count in known]
