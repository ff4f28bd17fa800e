"""float16 with a loss scaler.

float16 cannot hold small gradients, so the loss is multiplied by a large scale, and gradients are divided by it
before the step. Where they became infinite the step is skipped and the scale shrinks::

    backward: update scale if steps were taken since -> loss * scale -> gradients
    clip:     unscale (once)
    step:     unscale (if not yet) -> infinite? skip : step -> note that the scale wants an update

The scale is updated at the *next* backward and not after each optimizer, so that several optimizers which share a
loss see the same scale, as torch asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.errors import ConfigError
from nb_accelerate.precision.autocast import AutocastPrecision
from nb_accelerate.precision.precision import OptimizerStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from nb_accelerate.config.kwargs import AutocastKwargs, GradScalerKwargs


class ScaledStep(OptimizerStep):
    """The steps of one optimizer on scaled gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer, precision: FP16Precision) -> None:
        super().__init__(optimizer)
        self.unscaled = False
        self.stepped = False
        self._precision = precision
        self._scaler = precision.scaler

    @override
    def __call__(self, closure: Callable[[], float] | None = None) -> Any:
        _refuse(closure)
        self.unscale()
        # The sum that GradScaler.step looks at, read here because step does not say what it decided. Optimizers that
        # decide on the device (fused Adam) do not show it otherwise.
        found = self._scaler._found_inf_per_device(self.optimizer)  # noqa: SLF001
        if not found:  # no parameter has a gradient, or scaling is off
            self.skipped = False
            return self.optimizer.step()
        self.skipped = any(bool(value.item()) for value in found.values())
        self.stepped = self._precision.wants_update = True
        return self._scaler.step(self.optimizer)

    @override
    def unscale(self) -> None:
        if not self.unscaled and self._scaler.is_enabled():
            self._scaler.unscale_(self.optimizer)
            self.unscaled = True

    @override
    def discard(self) -> None:
        if self.unscaled and not self.stepped:
            self.unscaled = False
            self._precision.wants_update = True  # torch's scaler, too, forgets only when it is updated


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
        _refuse(closure)
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


def _refuse(closure: Callable[[], float] | None) -> None:
    if closure is not None:
        raise ConfigError(
            "optimizer.step was given a closure, which cannot work with mixed_precision='fp16': the closure's "
            "gradients would never be unscaled. Use mixed_precision='bf16' or 'no' for optimizers such as LBFGS."
        )


class FP16Precision(AutocastPrecision):
    """Compute in float16 under autocast, with a scaler for the loss.

    Attributes:
        scaler: torch's scaler.
        wants_update: whether a step was taken since the scale was last updated.
    """

    name = "fp16"
    scaler: torch.amp.GradScaler

    def __init__(self, device_type: str, options: AutocastKwargs, scaler_options: GradScalerKwargs) -> None:
        super().__init__(device_type, torch.float16, options)
        self.scaler = torch.amp.GradScaler(device_type, **scaler_options.to_dict())
        self.wants_update = False
        self._steps: list[ScaledStep] = []

    @override
    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Make the forward of a model compute in float16.

        Raises:
            ConfigError: the model's weights are float16 themselves; their gradients cannot be unscaled.
        """
        halves = [
            name for name, weight in model.named_parameters() if weight.requires_grad and weight.dtype is torch.float16
        ]
        if halves and self.scaler.is_enabled():
            raise ConfigError(
                f"mixed_precision='fp16' was asked for, but {len(halves)} weights of {type(model).__name__} (the first "
                f"is {halves[0]!r}) are float16 already, too coarse to be updated. Prepare the model in float32: "
                "write model.float() before prepare, or leave mixed_precision out."
            )
        return super().prepare_model(model)

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.update()
        self.scaler.scale(loss).backward(**kwargs)  # type: ignore[no-untyped-call]

    @override
    def without_scale(self, norm: Tensor) -> Tensor:
        return norm / self.scaler.scale(torch.ones((), device=norm.device))

    def update(self) -> None:
        """Adapt the scale to the steps taken since the last time, if there were any.

        Waits while an optimizer holds gradients that were unscaled and not used yet: they belong to this scale.
        """
        if self.wants_update and not any(step.unscaled and not step.stepped for step in self._steps):
            self.scaler.update()
            self.wants_update = False
            for step in self._steps:
                step.unscaled = step.stepped = False

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> OptimizerStep:
        step = ScaledStep(optimizer, self)
        self._steps.append(step)
        return step
