"""`Precision`: the interface of all precisions. Its defaults compute in the dtype of the model."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from nb_accelerate.training.precision.forward import AutocastForward, restore_forward
from nb_accelerate.training.precision.step import OptimizerStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor, nn

    from nb_accelerate.base.config.kwargs import AutocastKwargs
    from nb_accelerate.training.precision.scaler import LossScaler


class Precision:
    """Compute in the dtype that the model has.

    Attributes:
        name: the value of ``mixed_precision``.
        dtype: numbers that models compute in; None for those that the model has.
    """

    name = "no"
    dtype: torch.dtype | None = None
    scaler: LossScaler | None = None

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Make the forward of a model compute in this precision. Called by ``prepare``, before the strategy."""
        return restore_forward(model, AutocastForward)  # of another `Accelerator`

    def autocast(self, options: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Return a block that computes in this precision. Called by users around a loss function."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss of shape ``()``. Called once per batch."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def unscale(self, parameters: Sequence[Tensor]) -> None:
        """Divide the gradients of parameters by the loss scale. Called before clipping."""

    def without_scale(self, norm: Tensor, parameters: Sequence[Tensor]) -> Tensor:  # noqa: ARG002
        """Return a norm of gradients divided by the loss scale, without waiting for the device."""
        return norm

    def bind(self, optimizer: torch.optim.Optimizer) -> OptimizerStep:
        """Return what takes the steps of an optimizer in this precision. Called by ``prepare``."""
        return OptimizerStep(optimizer)
