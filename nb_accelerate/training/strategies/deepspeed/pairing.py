"""Which optimizer trains which model: an engine takes over one of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.strategies.optimizer_parameters import parameters_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn


def optimizer_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    """Return the optimizer that trains a model, of those that are prepared with it and others; None if there is none.

    It is refused if there are several, if it trains other models too, or has a state that the engine would lose.
    """
    own = {id(parameter) for parameter in model.parameters()}
    mine = [one for one in optimizers if not own.isdisjoint(map(id, parameters_of(one)))]
    if not mine:
        return None
    if len(mine) > 1:
        raise ConfigError(
            f"{len(mine)} optimizers train parts of one {type(model).__name__}, and a DeepSpeed engine has one. "
            "Make one optimizer with several parameter groups."
        )
    [optimizer] = mine
    others = sum(id(parameter) not in own for parameter in parameters_of(optimizer))
    if others:
        raise ConfigError(
            f"This {type(optimizer).__name__} trains {others} parameters that are not those of the "
            f"{type(model).__name__}, and a DeepSpeed engine has one model. Make an optimizer for each model, or put "
            "the models into one torch.nn.Module."
        )
    # Constructors of some optimizers (Adagrad) make a state; a state without "step" was made by a step.
    if any(state.get("step", 1) != 0 for state in optimizer.state.values()):
        raise ConfigError(
            f"This {type(optimizer).__name__} has taken steps or was loaded before prepare, and DeepSpeed begins with "
            "an empty state. Prepare it first, then call accelerator.load_state."
        )
    return optimizer
