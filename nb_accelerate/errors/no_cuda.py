"""Recognise torch's errors about CUDA on a machine that has none, or a process that sees none."""

from __future__ import annotations

# In torch's own words, from torch/cuda/__init__.py and its C++ code.
_TEXTS = ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs are available")

ADVICE = "These ranks have no CUDA device. Write accelerator.device where the code names one."
"""What to write instead."""


def says_no_cuda(type_name: str, text: str) -> bool:
    """Return whether an exception says that there is no CUDA device."""
    return type_name in ("AssertionError", "RuntimeError") and any(words in text for words in _TEXTS)
