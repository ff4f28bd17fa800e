"""The names of distributed setups, and of precisions."""

from __future__ import annotations

from enum import Enum


class DistributedType(str, Enum):
    """Which distributed setup a process is part of.

    Scripts compare with names of hardware and engines that this package does not run on, so those are here too; no
    process is ever one of them.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    MEGATRON_LM = "MEGATRON_LM"
    TPU = "XLA"  # noqa: PIE796 - another name of the same, in older scripts

    def __str__(self) -> str:
        return self.value


class PrecisionType(str, Enum):
    """The values of ``mixed_precision``."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def list(cls) -> list[str]:
        """Return the values, as they are written in code and in the environment."""
        return [member.value for member in cls]
