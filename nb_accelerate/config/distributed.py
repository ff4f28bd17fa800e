"""The names of distributed setups."""

from __future__ import annotations

from enum import Enum


class DistributedType(str, Enum):
    """Which distributed setup a process is part of."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"  # noqa: PIE796 - another name of the same, in older scripts

    def __str__(self) -> str:
        return self.value
