"""`OptimizerStep`: take the steps of one optimizer, with or without a loss scaler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class OptimizerStep:
    """Take the steps of one optimizer. Made by `Precision.bind`, once per prepared optimizer.

    `skipped`: the last step was not taken because gradients were infinite. `unscales`: `unscale` has anything to do.
    """

    skipped = False
    unscales = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step. Called by the prepared optimizer when an accumulation window closes."""
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def unscale(self) -> None:
        """Divide gradients by the loss scale, at most once per step. Called before clipping."""

    def discard(self) -> None:
        """Note that gradients were dropped. Called by ``zero_grad``."""


class GivenScalerStep(OptimizerStep):
    """Take the steps of one optimizer with the user's own scaler, which scales no other losses, and update it."""

    unscales = True

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
        self.skipped = self._scaler.get_scale() < before  # the scale shrinks only where gradients were infinite
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
    """Refuse a closure: the gradients it computes would not be unscaled."""
    if closure is not None:
        raise ConfigError(
            "optimizer.step was given a closure, which cannot work with mixed_precision='fp16': the closure's "
            "gradients would never be unscaled. Use mixed_precision='bf16' or 'no' for optimizers such as LBFGS."
        )
