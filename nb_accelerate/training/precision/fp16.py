"""float16 with a loss scaler.

float16 cannot hold small gradients, so the loss is multiplied by a large scale, and gradients are divided by it
before the step. Where they became infinite the step is skipped and the scale shrinks. `LossScaler` says when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.precision.precision import AutocastPrecision
from nb_accelerate.training.precision.scaler import LossScaler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from nb_accelerate.base.config.kwargs import AutocastKwargs, GradScalerKwargs
    from nb_accelerate.training.precision.scaler import ScaledStep


class FP16Precision(AutocastPrecision):
    """Compute in float16 under autocast, with a scaler for the loss.

    That of an earlier `Accelerator` keeps its scale until an optimizer that it does not know is prepared: a new
    training begins with a new scale.
    """

    name = "fp16"
    scaler: LossScaler

    def __init__(
        self,
        device_type: str,
        options: AutocastKwargs,
        scaler_options: GradScalerKwargs,
        scaler: LossScaler | None = None,
    ) -> None:
        super().__init__(device_type, torch.float16, options)
        if scaler is not None and scaler.device_type != device_type:
            scaler = None
        self._scaler_options = scaler_options.to_dict()
        self._takes_over = scaler is not None
        self._has_own_options = bool(scaler_options.to_kwargs())
        self.scaler = LossScaler(device_type, **self._scaler_options) if scaler is None else scaler

    @override
    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Make the forward of a model compute in float16. Weights in float16 are refused."""
        halves = [
            name for name, weight in model.named_parameters() if weight.requires_grad and weight.dtype is torch.float16
        ]
        if halves and self.scaler.is_enabled():
            raise ConfigError(
                f"mixed_precision='fp16' was asked for, but {len(halves)} weights of {type(model).__name__} (the first "
                f"is {halves[0]!r}) are float16 already, too coarse to be updated. Prepare the model in float32: "
                "write model.float() before prepare, or leave mixed_precision out."
            )
        self.scaler.models.add(model)
        return super().prepare_model(model)

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.scaler.scale(loss).backward(**kwargs)

    @override
    def unscale(self, parameters: Sequence[Tensor]) -> None:
        for step in self._steps_of(parameters):
            step.unscale()

    @override
    def without_scale(self, norm: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        scale = self.scaler._get_scale_async()  # noqa: SLF001 - get_scale waits for the device
        if scale is None or any(step.unscaled for step in self._steps_of(parameters)):
            return norm
        return norm / scale.to(norm.device)

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> ScaledStep:
        if self._takes_over:
            self._takes_over = False
            if self._has_own_options or not self.scaler.knows(optimizer):
                self.scaler.restart(**self._scaler_options)
        return self.scaler.bind(optimizer)

    def _steps_of(self, parameters: Sequence[Tensor]) -> list[ScaledStep]:
        wanted = {id(parameter) for parameter in parameters}
        return [step for step in self.scaler.steps() if any(id(parameter) in wanted for parameter in step.parameters())]
