"""The base of all precisions: it changes nothing, so that nobody has to ask whether there is one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from nb_accelerate.precision.forward import without_autocast
from nb_accelerate.precision.step import OptimizerStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor, nn

    from nb_accelerate.config.kwargs import AutocastKwargs
    from nb_accelerate.precision.scaler import LossScaler


class Precision:
    """Compute in the numbers the model was made with.

    Attributes:
        name: what users call it.
        scaler: what multiplies losses; None where nothing has to.
    """

    name = "no"
    scaler: LossScaler | None = None

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Make the forward of the user's model compute in this precision. ``prepare`` calls it before it wraps."""
        return without_autocast(model)

    def autocast(self, options: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Return a block that computes in this precision. Called by users around a loss function."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients of a loss. Called once per batch."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def unscale(self, parameters: Sequence[Tensor]) -> None:
        """Divide the gradients of parameters by what the loss was multiplied with. Called before clipping."""

    def without_scale(self, norm: Tensor, parameters: Sequence[Tensor]) -> Tensor:  # noqa: ARG002
        """Return the norm that gradients would have if the loss had not been multiplied. Waits for no device."""
        return norm

    def bind(self, optimizer: torch.optim.Optimizer) -> OptimizerStep:
        """Return how an optimizer takes its steps in this precision. Called by ``prepare``."""
        return OptimizerStep(optimizer)
