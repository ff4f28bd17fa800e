"""Choose the precision of an `Accelerator`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nb_accelerate.base.config.distributed import PrecisionType
from nb_accelerate.base.config.precision import AORecipeKwargs
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.precision.fp8 import FP8Precision
from nb_accelerate.training.precision.fp16 import FP16Precision
from nb_accelerate.training.precision.precision import AutocastPrecision, Precision

if TYPE_CHECKING:
    from nb_accelerate.base.config.kwargs import AutocastKwargs, GradScalerKwargs
    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.training.precision.fp16 import LossScaler


def select_precision(
    chosen: PrecisionType,
    kind: DeviceKind,
    *,
    autocast: AutocastKwargs,
    scaler: GradScalerKwargs,
    fp8: AORecipeKwargs | None = None,
    scaler_before: LossScaler | None = None,
) -> Precision:
    """Return the chosen precision, for a kind of device. One that it cannot compute in is refused."""
    if chosen is not PrecisionType.NO and chosen.value not in kind.mixed_precision:
        offered = " or ".join(map(repr, ("no", *kind.mixed_precision)))
        raise ConfigError(
            f"mixed_precision={chosen.value!r} was asked for, but torch does not offer it on {kind.name} devices. "
            f"Write mixed_precision={offered}."
        )
    if chosen is PrecisionType.BF16:
        if not kind.supports_bf16():
            raise ConfigError(
                f"mixed_precision='bf16' was asked for, but this {kind.name} device cannot compute in bfloat16. "
                "Write mixed_precision='fp16' or 'no'."
            )
        return AutocastPrecision(kind.name, torch.bfloat16, autocast)
    if chosen is PrecisionType.FP8:
        if not kind.supports_fp8():
            raise ConfigError(
                f"mixed_precision='fp8' was asked for, but this {kind.name} device has no units for 8-bit floating "
                "point numbers, which GPUs of compute capability 8.9 (Ada, Hopper) and newer have. Write "
                "mixed_precision='bf16' or 'fp16'."
            )
        return FP8Precision(kind.name, autocast, fp8 or AORecipeKwargs(pad_inner_dim=True))
    if chosen is PrecisionType.FP16:
        return FP16Precision(kind.name, autocast, scaler, scaler_before)
    return Precision()
