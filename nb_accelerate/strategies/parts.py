"""`OptimizerPart`: the state of an optimizer in a checkpoint, whole however the strategy keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from nb_accelerate.strategies.strategy import Strategy


class OptimizerPart:
    """An optimizer whose state is saved and loaded through its strategy.

    Args:
        optimizer: the one inside of the prepared one.
        strategy: knows how its state is spread over ranks.

    Attributes:
        optimizer: as given.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
        self.optimizer = optimizer
        self._strategy = strategy
        self._whole: dict[str, Any] | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer."""
        return self.optimizer.param_groups

    def collect(self, *, keep: bool) -> None:
        """Read the whole state, for `state_dict`. Collective where it is sharded, so it comes before any writing.

        Args:
            keep: whether this rank may write it.
        """
        self._whole = self._strategy.optimizer_state(self.optimizer, keep=keep)

    def state_dict(self) -> dict[str, Any]:
        """Return what `collect` read; without it, what this rank has of the state."""
        return self.optimizer.state_dict() if self._whole is None else self._whole

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a whole state, the same on all ranks."""
        self._strategy.load_optimizer_state(self.optimizer, state)
