"""Find the rank and device of this process, and connect it with the others.

::

    environment -> Topology -> device -> process group -> ProcessContext
                   (or the group that exists already)
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist

from nb_accelerate.base.config.env import DEVICE, Environment
from nb_accelerate.base.config.kwargs import InitProcessGroupKwargs
from nb_accelerate.base.devices import GLOO
from nb_accelerate.base.topology import Topology, read_topology
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.process import context, group
from nb_accelerate.training.process.context import ProcessContext
from nb_accelerate.training.process.devices import bind_near, choose_device, device_of_group, idle_kind

logger = logging.getLogger(__name__)


def setup_process(
    *,
    cpu: bool | None = None,
    options: InitProcessGroupKwargs | None = None,
    environment: Environment | None = None,
    needs_group: bool = False,
) -> ProcessContext:
    """Return the context of this process; the first call makes it, and later calls return the same.

    A process group that exists already is adopted and never destroyed by us.
    """
    environment = environment or Environment()
    # This process is set up already; an engine may want a group that it has not needed so far.
    process = context.current()
    if process is not None and needs_group and process.group is None:
        group.create_alone(process.kind, process.device)
        return context.install(replace(process, group=context.default_group(), owns_group=True))
    if process is not None:
        if cpu and not process.kind.is_host:
            raise ConfigError(
                f"cpu=True was given, but this process already trains on {process.device}, chosen when its first "
                "Accelerator was made. Write cpu=True in the first one."
            )
        if options is not None and process.group is not None and options != process.options:
            logger.warning("InitProcessGroupKwargs have no effect: this process already has a process group.")
        return process
    # Who it is and its device: as the environment says, or as the group that others have made.
    use_cpu = bool(environment.use_cpu) if cpu is None else cpu
    options = options or InitProcessGroupKwargs()
    adopted = context.default_group()
    read = topology = read_topology(environment.variables)
    if adopted is None:
        name = environment.text(DEVICE) or environment.text("ACCELERATE_TORCH_DEVICE")
        kind, device = choose_device(topology, cpu=use_cpu, name=name)
    else:
        # Who made the group need not have gone through the environment. Then all ranks are taken to be on this machine.
        rank, size = dist.get_rank(), dist.get_world_size()
        if (read.rank, read.world_size) != (rank, size):
            topology = replace(Topology(), rank=rank, world_size=size, local_rank=rank, local_world_size=size)
        if not use_cpu and dist.get_backend() == GLOO.name:
            use_cpu, idle = True, idle_kind()
            if idle is not None and topology.is_local_main:
                logger.warning(
                    "This process trains on the CPU although there are %s devices: the process group that exists "
                    "already carries tensors between CPUs (gloo). To train on them, leave init_process_group() to "
                    "Accelerator(), or write init_process_group(%r). To train on the CPU, write Accelerator(cpu=True).",
                    idle.name,
                    idle.backend and idle.backend.name,
                )
        guessed = topology is not read
        kind, device = device_of_group(adopted.bound_device_id, topology, guessed=guessed, cpu=use_cpu)
    # Connect it: by the runtime of its device, in a process group, or not at all.
    if environment.flag("ACCELERATE_CPU_AFFINITY"):
        bind_near(kind, topology.local_rank if device.index is None else device.index)
    if kind.start_runtime is not None:
        topology = kind.start_runtime(topology)
        device = torch.device(kind.name, kind.current_device())
    elif device.index is not None:
        kind.set_device(device.index)
    makes_group = adopted is None and kind.start_runtime is None and (needs_group or topology.world_size > 1)
    if makes_group and topology.world_size > 1:
        group.create(topology, kind, device, options=options, environment=environment)
    elif makes_group:
        group.create_alone(kind, device)
    return context.install(
        ProcessContext(
            topology=topology,
            kind=kind,
            device=device,
            group=context.default_group(),
            owns_group=makes_group,
            options=options,
        )
    )
