"""The base of all precisions: it changes nothing, so that nobody has to ask whether there is one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn

    from nb_accelerate.config.kwargs import AutocastKwargs


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
        """Divide gradients by what the loss was multiplied with, at most once per step. Called before clipping."""

    def discard(self) -> None:
        """Forget gradients that were unscaled but never used. Called when gradients are set to zero."""


class Precision:
    """Compute in the numbers the model was made with.

    Attributes:
        name: what users call it.
        scaler: what multiplies losses; None where nothing has to.
    """

    name = "no"
    scaler: torch.amp.GradScaler | None = None

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Make the forward of a model compute in this precision. Called by ``prepare``, before the strategy."""
        return model

    def autocast(self, options: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Return a block that computes in this precision. Called by users around a loss function."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients of a loss. Called once per batch."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def without_scale(self, norm: Tensor) -> Tensor:
        """Return the norm that gradients would have if the loss had not been multiplied. Waits for no device."""
        return norm

    def bind(self, optimizer: torch.optim.Optimizer) -> OptimizerStep:
        """Return how an optimizer takes its steps in this precision. Called by ``prepare``."""
        return OptimizerStep(optimizer)
