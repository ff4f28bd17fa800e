"""The parameters of an optimizer, and their names in the models that it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn


def parameter_names(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
    """Return the names of the parameters of an optimizer, by group.

    The first model that it trains has plain names, others have ``model_1.`` before them, say; tensors of no model have
    a number.
    """
    names: dict[int, str] = {}
    mine = set(map(id, parameters_of(optimizer)))
    for number, model in enumerate(models):
        new = {id(weight): name for name, weight in model.named_parameters() if id(weight) in mine - names.keys()}
        prefix = f"model_{number}." if names else ""
        names |= {key: prefix + name for key, name in new.items()}
    groups = []
    count = 0
    for group in optimizer.param_groups:
        numbered = enumerate(group["params"], count)
        groups.append([names.get(id(weight), f"tensor_{number}") for number, weight in numbered])
        count += len(group["params"])
    return groups


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
