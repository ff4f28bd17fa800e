"""Precisions that compute a model's forward under autocast and return its outputs in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.base.config.options import note_use
from nb_accelerate.training.precision.precision import AutocastForward, Precision, restore_forward

if TYPE_CHECKING:
    import contextlib

    from torch import nn

    from nb_accelerate.base.config.kwargs import AutocastKwargs


class AutocastPrecision(Precision):
    """Compute in a 16-bit dtype where autocast does; weights and optimizer state stay in float32."""

    def __init__(self, device_type: str, dtype: torch.dtype, options: AutocastKwargs) -> None:
        self.device_type = device_type
        self.dtype: torch.dtype = dtype
        self.options = options

    @override
    def prepare_model(self, model: nn.Module) -> nn.Module:
        arguments = self._arguments(self.options)
        present = model.forward
        if not isinstance(present, AutocastForward) or present.arguments != arguments:
            restore_forward(model, AutocastForward)
            model.forward = AutocastForward(model.forward, arguments)
            note_use(self.options, "the model that was prepared", advice="Set it before accelerator.prepare(model).")
        return model

    @override
    def autocast(self, options: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(**self._arguments(options or self.options))

    def _arguments(self, options: AutocastKwargs) -> dict[str, Any]:
        return {
            "device_type": self.device_type,
            "dtype": self.dtype,
            "enabled": options.enabled,
            "cache_enabled": options.cache_enabled,
        }


class BF16Precision(AutocastPrecision):
    """Compute in bfloat16 under autocast. It has the range of float32, so gradients need no scaling."""

    name = "bf16"

    def __init__(self, device_type: str, options: AutocastKwargs) -> None:
        super().__init__(device_type, torch.bfloat16, options)
