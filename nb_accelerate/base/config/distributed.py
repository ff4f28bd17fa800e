"""The names of distributed setups, and of precisions."""

from __future__ import annotations

from enum import Enum


class Word(str, Enum):
    """A word of an option, which is the text itself."""

    def __str__(self) -> str:
        return str(self.value)


class DistributedType(Word):
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
    TPU = "XLA"


class PrecisionType(Word):
    """The values of ``mixed_precision``."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"

    @classmethod
    def list(cls) -> list[str]:
        """Return the values, as they are written in code and in the environment."""
        return [member.value for member in cls]
