"""bfloat16: the range of float32 with eight bits of precision, so gradients need no scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nb_accelerate.precision.autocast import AutocastPrecision

if TYPE_CHECKING:
    from nb_accelerate.config.kwargs import AutocastKwargs


class BF16Precision(AutocastPrecision):
    """Compute in bfloat16 under autocast."""

    name = "bf16"

    def __init__(self, device_type: str, options: AutocastKwargs) -> None:
        super().__init__(device_type, torch.bfloat16, options)
