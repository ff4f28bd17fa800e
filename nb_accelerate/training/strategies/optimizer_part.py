"""`OptimizerPart`: the state of an optimizer in a checkpoint, whole however the strategy keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_accelerate.training.strategies.optimizer_parameters import parameter_names

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
