"""Warnings for training on several processes with what was not prepared: each trains by itself."""

from __future__ import annotations

import functools
import gc
import logging
import sys
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch.optim.optimizer import register_optimizer_step_pre_hook

from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.training.state.shared import shared_training

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.optim.optimizer import Optimizer

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.state.shared import SharedTraining

logger = logging.getLogger("nb_accelerate")

# By name: the modules that they are in take long to import.
_SHARDED = "DTensor"
_AVERAGING = ("DistributedDataParallel", "FullyShardedDataParallel")


def watch_for_unprepared_training(collectives: Collectives, shared: SharedTraining) -> None:
    """Warn of optimizers that take steps though they were not prepared. Called by each `Accelerator`.

    On several ranks the first step is looked at, of whatever optimizer. Nothing is said where somebody else may average
    the gradients: `DistributedDataParallel`, FSDP or DeepSpeed. With fp16, the first step of each optimizer is.
    """
    if shared.before_step is not None or collectives.rank or (collectives.world_size == 1 and shared.scaler is None):
        return
    is_first = collectives.world_size > 1
    told: WeakSet[Optimizer] = WeakSet()

    def look_at(optimizer: Optimizer) -> None:
        nonlocal is_first
        if shared.scaler is not None and here().phase != Phase.STEP and optimizer not in told:
            told.add(optimizer)
            if _trains(optimizer, shared.scaler.models):
                logger.warning(
                    "%s.step was called on an optimizer that prepare() did not return. With mixed_precision='fp16', "
                    "gradients of accelerator.backward are multiplied with the loss scale, and only prepared "
                    "optimizers divide them. Write optimizer = accelerator.prepare(optimizer), and call its step.",
                    type(optimizer).__name__,
                )
        if is_first:
            is_first = False
            _warn_of_first_step(optimizer, collectives.world_size, shared)

    shared.before_step = look_at
    _register()


@functools.cache
def _register() -> None:
    """Register a hook, once in a process. It stays: torch iterates over its hooks while it calls them."""

    def hook(optimizer: Optimizer, _arguments: object, _named: object) -> None:
        look_at = shared_training().before_step
        if look_at is not None:
            look_at(optimizer)

    register_optimizer_step_pre_hook(hook)


def _warn_of_first_step(optimizer: Optimizer, world_size: int, shared: SharedTraining) -> None:
    if optimizer in shared.given_optimizers and here().phase != Phase.STEP:
        logger.warning(
            "The optimizer that prepare() returned is not used: the one it was given takes this step. If its "
            "model is not used either, each of the %d processes trains one of its own. Keep what it returns: "
            "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            world_size,
        )
    elif not shared.window.closes and optimizer not in shared.given_optimizers and _trains(optimizer, shared.models):
        logger.warning(
            "The optimizer was not prepared, so it does not wait for the last of the batches whose gradients "
            "are accumulated, and the models of the %d processes drift apart. Prepare it too: model, "
            "optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            world_size,
        )
    elif not (shared.models or shared.optimizers or _is_averaged(optimizer)):
        logger.warning(
            "Nothing was prepared, so each of the %d processes trains a model of its own, unless your code "
            "averages gradients. To train one: model, optimizer, loader = accelerator.prepare(model, "
            "optimizer, loader), and accelerator.backward(loss)",
            world_size,
        )


def _trains(optimizer: Optimizer, models: Iterable[nn.Module]) -> bool:
    """Return whether an optimizer has a parameter of one of these models."""
    prepared = {id(parameter) for model in models for parameter in model.parameters()}
    return any(id(parameter) in prepared for group in optimizer.param_groups for parameter in group["params"])


def _is_averaged(optimizer: Optimizer) -> bool:
    """Return whether a library may average the gradients of an optimizer."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if "deepspeed" in sys.modules or any(type(parameter).__name__ == _SHARDED for parameter in parameters):
        return True
    return any(type(item).__name__ in _AVERAGING for item in gc.get_objects())
