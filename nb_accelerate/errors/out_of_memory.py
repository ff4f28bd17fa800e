"""Recognise the errors that say that memory did not suffice, by type or by text."""

from __future__ import annotations

import re

# What torch and its libraries say when memory does not suffice, where they have no exception type for it.
_TEXTS = (
    "out of memory",  # CUDA, HIP, XPU and MPS: "CUDA out of memory. Tried to allocate ..."
    "CUDNN_STATUS_NOT_SUPPORTED",  # cudnn found no algorithm that fits into what is left
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)
_TYPES = ("OutOfMemoryError", "MemoryError")
# Types of torch that say it in their text, or something else: the last two are of CUDA and of NCCL.
_TYPES_WITH_TEXT = ("RuntimeError", "AcceleratorError", "DistBackendError")

_WANTED = r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def says_out_of_memory(type_name: str, text: str) -> bool:
    """Return whether an exception says that memory did not suffice, on a device or on the host."""
    name = type_name.rpartition(".")[2]
    return name in _TYPES or (name in _TYPES_WITH_TEXT and any(words in text for words in _TEXTS))


def bytes_wanted(text: str) -> int:
    """Return how many bytes could not be had, as the text of such an exception says; 0 if it does not say."""
    found = re.search(_WANTED, text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0
