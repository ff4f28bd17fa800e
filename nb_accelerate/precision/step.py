"""How an optimizer takes a step. The base of all precisions: it just does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class OptimizerStep:
    """How one optimizer takes a step. Made by `Precision.bind`, once per prepared optimizer.

    Attributes:
        skipped: whether the last step was not taken because gradients were infinite.
    """

    skipped = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step. Called by the prepared optimizer when an accumulation window closes."""
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def unscale(self) -> None:
        """Divide gradients by what the loss was multiplied with, at most once. Called before clipping."""

    def discard(self) -> None:
        """Forget gradients. Called when they are set to zero."""


class GivenScalerStep(OptimizerStep):
    """The steps of one optimizer with a scaler of the user's, who scales the loss: update the scale after each.

    Args:
        optimizer: the user's.
        scaler: used for no other optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        super().__init__(optimizer)
        self._scaler = scaler
        self._unscaled = False

    @override
    def __call__(self, closure: Callable[[], float] | None = None) -> Any:
        refuse_closure(closure)
        before = self._scaler.get_scale()
        result = self._scaler.step(self.optimizer)
        self._scaler.update()
        self._unscaled = False
        self.skipped = self._scaler.get_scale() < before  # it shrinks where gradients were infinite, and only there
        return result

    @override
    def unscale(self) -> None:
        if not self._unscaled:
            self._scaler.unscale_(self.optimizer)
            self._unscaled = True

    @override
    def discard(self) -> None:
        if self._unscaled:
            self._scaler.update()
            self._unscaled = False


def refuse_closure(closure: Callable[[], float] | None) -> None:
    """Refuse a closure, which computes gradients that nobody would unscale.

    Raises:
        ConfigError: there is one.
    """
    if closure is not None:
        raise ConfigError(
            "optimizer.step was given a closure, which cannot work with mixed_precision='fp16': the closure's "
            "gradients would never be unscaled. Use mixed_precision='bf16' or 'no' for optimizers such as LBFGS."
        )
