"""How many bytes things take, and how to say it."""

from __future__ import annotations

from enum import Enum

import torch


class CustomDtype(str, Enum):
    """Number formats of weights for which torch has no dtype of its own."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


_BYTES = {CustomDtype.FP8: 1, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Return the bytes of one number; an eighth for booleans, as sizes of models are estimated."""
    if isinstance(dtype, CustomDtype):
        return _BYTES[dtype]
    return 0.125 if dtype is torch.bool else dtype.itemsize


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text for people: ``"2.0 KB"`` is 2048 bytes."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"
