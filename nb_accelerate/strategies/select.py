"""Choose how ranks exchange data, and how they train models. Nobody else asks which one was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from nb_accelerate.comm import CheckedCollectives, SingleCollectives, TorchCollectives
from nb_accelerate.config.checks import first_given
from nb_accelerate.config.env import DEBUG_MODE, Environment
from nb_accelerate.devices import backend_named
from nb_accelerate.strategies.ddp import DDPStrategy
from nb_accelerate.strategies.fsdp import FSDPStrategy
from nb_accelerate.strategies.single import SingleStrategy

if TYPE_CHECKING:
    from nb_accelerate.comm import Collectives
    from nb_accelerate.config.engines import EngineOptions
    from nb_accelerate.process.context import ProcessContext
    from nb_accelerate.strategies.strategy import Strategy


def select_collectives(process: ProcessContext) -> Collectives:
    """Return how this process exchanges data with the others; one without a process group exchanges none."""
    if process.group is None:
        return SingleCollectives()
    checks = Environment().flag(DEBUG_MODE)
    # On CPU a check costs one small message, and what it prevents is an abort or endless waiting. On a GPU the host
    # would have to wait for the device, so there it has to be asked for.
    if first_given(checks, default=not backend_named(dist.get_backend()).returns_early):
        return CheckedCollectives(process.device, device_ids=_device_ids(process), thorough=bool(checks))
    return TorchCollectives(process.device, device_ids=_device_ids(process))


def select_strategy(process: ProcessContext, engines: EngineOptions) -> Strategy:
    """Return how models are trained in this process.

    Args:
        process: its device and its process group.
        engines: the options of each engine; which of them are given decides.
    """
    collectives = select_collectives(process)
    if process.topology.world_size == 1:
        return SingleStrategy(process.device, collectives, process.distributed_type)
    if engines.fsdp is not None:
        assert process.group is not None  # there are several ranks
        return FSDPStrategy(process.device, collectives, group=process.group, options=engines.fsdp)
    return DDPStrategy(
        process.device,
        collectives,
        process.distributed_type,
        options=engines.ddp,
        pass_device_ids=_device_ids(process) is not None,
    )


def _device_ids(process: ProcessContext) -> list[int] | None:
    """Return the index of the device in a list, for backends that take it; None for others."""
    is_numbered = process.kind.passes_device_ids and process.device.index is not None
    return [process.device.index] if is_numbered else None
