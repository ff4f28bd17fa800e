"""What the header of a safetensors file says: where each weight is, its dtype and its shape."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_LONGEST = 100_000_000
"""Bytes of a header, at most: the limit of the format's own library."""

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip

_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name)
    for code, name in _NAMES.items()
    if hasattr(torch, name)  # the last two came with torch 2.7 and 2.8
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a weight is."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte of the file at which it begins
    end: int  # byte after its last


def read_header(file: Path, descriptor: int) -> dict[str, TensorEntry]:
    """Return the weights of an open file, in the order in which they follow each other.

    The format ([safetensors](https://github.com/huggingface/safetensors#format)): the length of the header in 8 bytes,
    a header in JSON, and the numbers of all weights without gaps.
    """
    try:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LONGEST):
            raise ValueError(f"it has {size} bytes, and its first 8 announce a header of {length}")
        header = json.loads(os.pread(descriptor, length, 8))
        kind = (header.pop("__metadata__", None) or {}).get("format", "pt")
        entries = {name: _entry(file, 8 + length, name, fields) for name, fields in header.items()}
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
        _check_places(entries, 8 + length, size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read, it may have been cut off or damaged: {error}") from error
    if kind != "pt":
        raise CheckpointError(f"{file} was saved by {kind}, and not by PyTorch.")
    return entries


def _entry(file: Path, data: int, name: str, fields: dict[str, Any]) -> TensorEntry:
    (start, end), shape = fields["data_offsets"], fields["shape"]
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
        raise ValueError(f"{name} has a shape or offsets that are no sizes")
    if fields["dtype"] not in _DTYPES:
        raise ValueError(f"{name} is of dtype {fields['dtype']!r}, which this torch ({torch.__version__}) has not")
    dtype = _DTYPES[fields["dtype"]]
    if fields["dtype"] == "F4":  # two numbers a byte
        shape = [*shape[:-1], shape[-1] // 2]
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} of shape {shape} and {dtype} does not take {end - start} bytes")
    return TensorEntry(file, dtype, tuple(shape), data + start, data + end)


def _check_places(entries: dict[str, TensorEntry], data: int, size: int) -> None:
    before = data
    for name, entry in entries.items():
        if entry.start != before:
            raise ValueError(f"{name} does not begin where the weight before it ends")
        before = entry.end
    if before != size:
        raise ValueError(f"it has {size} bytes, and its header says {before}")
