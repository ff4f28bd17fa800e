"""Errors and warnings for what was not prepared, or does not belong together."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch.optim.optimizer import register_optimizer_step_pre_hook

from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.errors import NotPreparedError
from nb_accelerate.training.state.choices import shared_training

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn
    from torch.optim.optimizer import Optimizer

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.state.choices import SharedTraining

logger = logging.getLogger("nb_accelerate")

MAKE_IT_INSIDE = (
    "It knows only the process it was made in. Make it, and what it prepares, inside of the function that you launch: "
    "def train(): accelerator = Accelerator(); model, optimizer, loader = accelerator.prepare(...)."
)


def watch_for_unprepared_training(collectives: Collectives, shared: SharedTraining) -> None:
    """Warn of optimizers that take steps though they were not prepared. Called by each `Accelerator`.

    On several ranks the first step of any optimizer is checked, and with fp16 the first step of each.
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


def _trains(optimizer: Optimizer, models: Iterable[nn.Module]) -> bool:
    """Return whether an optimizer has a parameter of one of these models."""
    prepared = {id(parameter) for model in models for parameter in model.parameters()}
    return any(id(parameter) in prepared for group in optimizer.param_groups for parameter in group["params"])


def check_owned(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
    """Warn of an optimizer that trains nothing. Called before its first step.

    Parameters need not belong to a model (a temperature, a soft prompt, an image); they have gradients by then.
    """
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not mine or any(parameter.grad is not None for parameter in mine):
        return
    prepared = list(models)
    owned = {id(parameter) for model in prepared for parameter in model.parameters()}
    if not prepared or any(id(parameter) in owned for parameter in mine):
        return
    names = ", ".join(type(model).__name__ for model in prepared)
    logger.warning(
        "None of the %d parameters of this %s belongs to a prepared model (%s), and none has a gradient, so it trains "
        "nothing. Make it from the parameters of the model that you prepare: optimizer = Optimizer(model.parameters()) "
        "after the last change that replaces them (a new model, resized embeddings), then model, optimizer = "
        "accelerator.prepare(model, optimizer).",
        len(mine),
        type(optimizer).__name__,
        names,
    )


def forgotten_model(world_size: int) -> NotPreparedError:
    """Return the error for training on several ranks when nothing was prepared."""
    return NotPreparedError(
        f"accelerator.backward was called on {world_size} ranks, but no model and no optimizer went through prepare. "
        "Each rank would train a copy of its own, on its part of the data. Write model, optimizer, loader = "
        "accelerator.prepare(model, optimizer, loader). A model that you wrapped yourself may be handed to prepare "
        "too; it stays as it is."
    )


def foreign_accelerator() -> NotPreparedError:
    """Return the error for an `Accelerator` that this process inherited from the one that started it."""
    return NotPreparedError(
        "accelerator.backward was called on an Accelerator that was made in another process, before this one was "
        f"started from it. {MAKE_IT_INSIDE}"
    )
