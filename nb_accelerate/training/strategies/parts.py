"""`OptimizerPart`: the state of an optimizer in a checkpoint, whole however the strategy keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from nb_accelerate.training.strategies.strategy import Strategy


class OptimizerPart:
    """An optimizer, the one inside of the prepared one, whose state is saved and loaded through its strategy.

    `names` are those of its parameters, by group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, strategy: Strategy, models: Sequence[nn.Module] = ()) -> None:
        self.optimizer = optimizer
        self.names = parameter_names(optimizer, models)
        self._strategy = strategy
        self._whole: dict[str, Any] | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer."""
        return self.optimizer.param_groups

    def collect(self, *, keep: bool) -> None:
        """Read the whole state, for `state_dict`. Collective where it is sharded, so it comes before any writing."""
        self._whole = self._strategy.optimizer_state(self.optimizer, keep=keep)

    def state_dict(self) -> dict[str, Any]:
        """Return what `collect` read; without it, what this rank has of the state."""
        return self.optimizer.state_dict() if self._whole is None else self._whole

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a whole state, the same on all ranks."""
        self._strategy.load_optimizer_state(self.optimizer, state)


def parameter_names(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
    """Return the names of the parameters of an optimizer, by group.

    Args:
        models: the user's. The first one that it trains has plain names, others have ``model_1.`` before them, say;
            tensors of no model have a number.
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
