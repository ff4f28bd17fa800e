"""Errors for models, optimizers and accelerators that do not belong together."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nb_accelerate.errors import NotPreparedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

logger = logging.getLogger("nb_accelerate")


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


MAKE_IT_INSIDE = (
    "It knows only the process it was made in. Make it, and what it prepares, inside of the function that you launch: "
    "def train(): accelerator = Accelerator(); model, optimizer, loader = accelerator.prepare(...)."
)
