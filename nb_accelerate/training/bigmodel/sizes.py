"""Compute how many bytes a model and its modules take."""

from __future__ import annotations

import re
from collections import defaultdict
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nb_accelerate.base.config.checks import check_whole
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping


class CustomDtype(str, Enum):
    """Name formats of weights that torch has no dtype for."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


_BYTES = {CustomDtype.FP8: 1, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}

_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?|)([Bb])", re.IGNORECASE)


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Return the bytes of one element, 0.125 for booleans, as accelerate does."""
    if isinstance(dtype, CustomDtype):
        return _BYTES[dtype]
    return 0.125 if dtype is torch.bool else dtype.itemsize


def compute_module_sizes(
    model: nn.Module,
    dtype: torch.dtype | CustomDtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | CustomDtype | str] | None = None,
    buffers_only: bool = False,
) -> dict[str, float]:
    """Return the bytes of each module and tensor by its name; ``""`` is the whole model. Tied weights count once.

    Args:
        model: on any device, also on ``meta``.
        dtype: count floating point tensors as if they had this dtype, where that makes them smaller.
        special_dtypes: count these tensors, by name, as if they had these dtypes.
        buffers_only: leave out parameters.

    Raises:
        ConfigError: a dtype is given by a name that torch does not have.
    """
    wanted = None if dtype is None else dtype_byte_size(_counted(dtype))
    special = {name: dtype_byte_size(_counted(kind)) for name, kind in (special_dtypes or {}).items()}
    sizes: dict[str, float] = defaultdict(int)
    tensors = [] if buffers_only else list(model.named_parameters())
    for name, tensor in [*tensors, *model.named_buffers()]:
        each = dtype_byte_size(tensor.dtype)
        if name in special:
            each = special[name]
        elif wanted is not None and (tensor.is_floating_point() or tensor.is_complex()):
            each = min(each, wanted)
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += tensor.numel() * each
    return sizes


def get_max_layer_size(
    modules: Iterable[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, float],
    no_split_module_classes: Collection[str],
) -> tuple[float, list[str]]:
    """Return the bytes of the largest layer, and the names of all layers of that size.

    A layer is a module without submodules, a module of one of ``no_split_module_classes``, or a tensor outside of
    such modules.

    Args:
        modules: names and modules or tensors, as from ``named_children``.
        module_sizes: the result of `compute_module_sizes`.
        no_split_module_classes: names of module classes that count as one layer.
    """
    layers = [name for start, module in modules for name in _layers(start, module, no_split_module_classes)]
    greatest = max((module_sizes[name] for name in layers), default=0)
    return greatest, [name for name in layers if greatest and module_sizes[name] == greatest]


def calculate_maximum_sizes(model: nn.Module) -> tuple[float, tuple[float, list[str]]]:
    """Return the bytes of a model, and those of its largest layer with the names of layers of that size.

    Modules of the classes in ``model._no_split_modules``, which models of transformers have, count as one layer.
    """
    sizes = compute_module_sizes(model)
    whole: list[tuple[str, Any]] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return sizes[""], get_max_layer_size(whole, sizes, getattr(model, "_no_split_modules", None) or ())


def _layers(name: str, module: nn.Module | torch.Tensor, whole: Collection[str]) -> Iterable[str]:
    children = list(module.named_children()) if isinstance(module, nn.Module) else []
    if not children or type(module).__name__ in whole:
        yield name
        return
    for child, part in children:
        yield from _layers(f"{name}.{child}", part, whole)


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes: ``"5GB"`` is 5,000,000,000 and ``"5GiB"`` 5 * 2**30; ``"5Gb"`` counts bits.

    Raises:
        ConfigError: it is not a size.
    """
    if isinstance(size, int):
        return check_whole("size", size, at_least=0)
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ConfigError(f"size={size!r} is not a size. Write bytes, or text such as '5GB' or '200MiB'.")
    size_in_units = float(match[1]) * _PREFIXES[match[2].upper()]
    return int(size_in_units / 8 if match[3] == "b" else size_in_units)


def as_dtype(given: torch.dtype | str) -> torch.dtype:
    """Return a dtype, which may be given by its name, with or without ``torch.``."""
    if not isinstance(given, str):
        return given
    dtype = getattr(torch, given.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype={given!r} is not a number format of torch. Write 'float16' or torch.float16, say.")
    return dtype


def _counted(given: torch.dtype | CustomDtype | str) -> torch.dtype | CustomDtype:
    return given if isinstance(given, CustomDtype) else as_dtype(given)
