"""Choose the strategy, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.comm import SingleCollectives, TorchCollectives
from nb_accelerate.strategies.ddp import DDPStrategy
from nb_accelerate.strategies.single import SingleStrategy

if TYPE_CHECKING:
    from nb_accelerate.config.kwargs import DistributedDataParallelKwargs
    from nb_accelerate.process.context import ProcessContext
    from nb_accelerate.strategies.strategy import Strategy


def select_strategy(process: ProcessContext, *, ddp: DistributedDataParallelKwargs) -> Strategy:
    """Return how models are trained in this process: alone, or as one of the ranks of a process group."""
    if process.group is None:
        return SingleStrategy(process.device, SingleCollectives())
    numbered = process.kind.passes_device_ids and process.device.index is not None
    device_ids = [process.device.index] if numbered else None
    collectives = TorchCollectives(process.device, device_ids=device_ids)
    if process.topology.world_size == 1:
        return SingleStrategy(process.device, collectives)
    return DDPStrategy(process.device, collectives, options=ddp, pass_device_ids=numbered)
