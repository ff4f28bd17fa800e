"""Say where in a structure its tensors are, in the words of Python: ``['outputs'][0].logits``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def paths_of_tensors(data: Any, path: str = "") -> list[str]:
    """Return the path of each tensor, in the order of `tensors_in`; that of a single tensor is empty."""
    if isinstance(data, Tensor):
        return [path]
    inside: list[tuple[str, Any]] = []
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        inside = [(f"{path}.{name}", value) for name, value in zip(data._fields, data, strict=True)]
    elif isinstance(data, (list, tuple)):
        inside = [(f"{path}[{index}]", value) for index, value in enumerate(data)]
    elif isinstance(data, Mapping):
        inside = [(f"{path}[{key!r}]", value) for key, value in data.items()]
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        inside = [(f"{path}.{field.name}", getattr(data, field.name)) for field in dataclasses.fields(data)]
    return [found for where, value in inside for found in paths_of_tensors(value, where)]
