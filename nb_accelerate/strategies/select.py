"""Choose the strategy, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from nb_accelerate.comm import CheckedCollectives, SingleCollectives, TorchCollectives
from nb_accelerate.config.checks import first_given
from nb_accelerate.config.env import DEBUG_MODE, Environment
from nb_accelerate.devices import backend_named
from nb_accelerate.strategies.ddp import DDPStrategy
from nb_accelerate.strategies.single import SingleStrategy

if TYPE_CHECKING:
    from nb_accelerate.comm import Collectives
    from nb_accelerate.config.kwargs import DistributedDataParallelKwargs
    from nb_accelerate.process.context import ProcessContext
    from nb_accelerate.strategies.strategy import Strategy


def select_collectives(process: ProcessContext) -> Collectives:
    """Return how the ranks of a process group talk to each other; a process without one talks to itself."""
    if process.group is None:
        return SingleCollectives()
    checks = Environment().flag(DEBUG_MODE)
    # On CPU a check costs one small message, and what it prevents is an abort or endless waiting. On a GPU the host
    # would have to wait for the device, so there it has to be asked for.
    if first_given(checks, default=not backend_named(dist.get_backend()).returns_early):
        return CheckedCollectives(process.device, device_ids=_numbers(process), thorough=bool(checks))
    return TorchCollectives(process.device, device_ids=_numbers(process))


def select_strategy(process: ProcessContext, *, ddp: DistributedDataParallelKwargs) -> Strategy:
    """Return how models are trained in this process: alone, or as one of the ranks of a process group."""
    collectives = select_collectives(process)
    if process.topology.world_size == 1:
        return SingleStrategy(process.device, collectives)
    return DDPStrategy(process.device, collectives, options=ddp, pass_device_ids=_numbers(process) is not None)


def _numbers(process: ProcessContext) -> list[int] | None:
    """The number of the device in a list, for backends that want to know."""
    numbered = process.kind.passes_device_ids and process.device.index is not None
    return [process.device.index] if numbered else None
