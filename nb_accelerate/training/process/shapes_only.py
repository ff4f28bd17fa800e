"""Run operations on large tensors without computing: outputs have the right shapes, and memory that nothing touches.

So a model and a batch that this machine could not hold take the way that they would take, with the memory of a small
one: a system gives pages to memory when it is written to. Small tensors are computed, and so is what has no kernel for
shapes alone, or returns a shape that depends on values.
"""

from __future__ import annotations

import enum
import functools
import mmap
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nb_accelerate.training.process.live_bytes import tensors_in

_LARGE = 1 << 20  # bytes
_RUN = ("c10d::", "_c10d_functional::", "aten::set_", "aten::resize", "aten::empty", "aten::new_empty", "aten::_local_")


class Ran(enum.Enum):
    """How an operation was run."""

    COMPUTED = enum.auto()
    FOR_SHAPES = enum.auto()  # without computing
    BY_VALUES = enum.auto()  # computed, since nothing but the values tells the shape of what it returns


def run_operation(func: Any, args: Any, kwargs: Any) -> tuple[Any, Ran]:
    """Return what an operation returns, and how it was run.

    Args:
        func: the operation, as ``__torch_dispatch__`` gets it.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    any_large, effect = any(map(is_large, tensors_in(args, kwargs))), _effect(func)
    if effect == "writes" and any_large:
        return _written(func._schema, args, kwargs), Ran.FOR_SHAPES  # noqa: SLF001 - as modes of torch do
    ran = Ran.COMPUTED
    if effect == "makes":
        try:
            made = func(*tree_map(as_meta, args), **tree_map(as_meta, kwargs))
        except RuntimeError:  # no such kernel; or the arguments are wrong, which the operation itself says below
            ran = Ran.BY_VALUES
        else:
            if any_large or any(map(is_large, tensors_in(made))):
                return tree_map(unwritten, made), Ran.FOR_SHAPES
    return func(*args, **kwargs), ran


@functools.cache
def _effect(func: Any) -> str:
    """Return whether an operation makes tensors, only writes to its arguments, or has to be run in any case."""
    schema = func._schema  # noqa: SLF001 - as modes of torch do
    if torch.Tag.inplace_view in func.tags or schema.name.startswith(_RUN):
        return "runs"
    writes = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    views = [each for each in schema.returns if each.alias_info is not None and not each.alias_info.is_write]
    if views:
        return "runs"
    if writes and all(each.alias_info is not None for each in schema.returns):
        return "writes"
    return "makes" if schema.returns else "runs"


def _written(schema: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments that an operation would have written to, as it does."""
    arguments = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    returned = [
        arguments[next(each.name for each in schema.arguments if _same(each.alias_info, one.alias_info))]
        for one in schema.returns
    ]
    return returned[0] if len(returned) == 1 else tuple(returned) or None


def _same(one: Any, other: Any) -> bool:
    return one is not None and one.before_set == other.before_set


def is_large(tensor: Tensor) -> bool:
    """Return whether a tensor is too large to be computed."""
    return tensor.nbytes >= _LARGE


def as_meta(value: Any) -> Any:
    """Return the shape of a tensor, as one on the device ``meta``; another value as it is, and that device."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def unwritten(made: Any) -> Any:
    """Return a tensor like one without memory: of zeros, or of one where it is small, so that users divide by it."""
    if not isinstance(made, Tensor):
        return made
    if not is_large(made):
        ones = int(made.dtype.is_floating_point or made.dtype.is_complex)
        return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype).fill_(ones)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(made.shape, made.stride(), strict=True))
    # Zeros as well, whose pages are not there: memory of the C library would hold what was in it before.
    pages = mmap.mmap(-1, extent * made.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=made.dtype).as_strided(made.shape, made.stride())
