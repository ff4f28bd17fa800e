"""Find the user's model inside the wrappers that distribute and compile it, and the parameters of an optimizer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nb_accelerate.training.precision.precision import restore_forward

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from torch import nn


def _is_wrapper(model: Any) -> bool:
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)  # where it is not imported there is none
    return isinstance(model, (DistributedDataParallel, DataParallel, *([] if engine is None else [engine])))


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the user's model inside DistributedDataParallel, DataParallel or an engine of DeepSpeed.

    Args:
        model: prepared or not.
        keep_fp32_wrapper: False also restores the forward that mixed precision replaced.
        keep_torch_compile: False also removes `torch.compile`. True on a compiled wrapper returns the model inside,
            compiled with the same options at its next call, unless only regions of it were compiled.
        recursive: also unwrap the submodules of the model.
    """
    outside: Any = model if hasattr(model, "_orig_mod") else None  # compiled, whole or by regions
    inner: Any = model._orig_mod if outside is not None else model  # noqa: SLF001 - torch.compile's name for it
    wrapped = _is_wrapper(inner)
    while _is_wrapper(inner):
        inner = inner.module
    if recursive:
        for name, part in inner.named_children():
            setattr(inner, name, extract_model_from_parallel(part, True, True, True))
    if not keep_fp32_wrapper:
        restore_forward(getattr(inner, "_orig_mod", inner))
    if not keep_torch_compile:
        return getattr(inner, "_orig_mod", inner)  # type: ignore[no-any-return]
    if outside is None or hasattr(inner, "_orig_mod"):
        return inner  # type: ignore[no-any-return]
    if not wrapped:
        return outside  # type: ignore[no-any-return]
    compile_again = getattr(outside, "dynamo_ctx", None)  # missing where only regions were compiled
    return inner if compile_again is None else compile_again(inner)  # type: ignore[no-any-return]


def innermost(model: nn.Module) -> nn.Module:
    """Return the user's model inside all wrappers, `torch.compile` included; the model is not changed."""
    inner: Any = model
    while (wrapped := _is_wrapper(inner)) or hasattr(inner, "_orig_mod"):
        inner = inner.module if wrapped else inner._orig_mod  # noqa: SLF001 - torch.compile's name for it
    return inner  # type: ignore[no-any-return]


def flattened(models: Iterable[Any]) -> Iterator[nn.Module]:
    """Yield the modules in what a user gives for models: in lists and tuples too, and nothing of other kinds."""
    for item in models:
        if isinstance(item, (list, tuple)):
            yield from flattened(item)
        elif isinstance(item, Module):
            yield item


def parameter_names(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
    """Return the names of the parameters of an optimizer, by group.

    The first model that it trains has plain names, others have ``model_1.`` before them, say; tensors of no model have
    a number.
    """
    names: dict[int, str] = {}
    mine = set(map(id, parameters_of(optimizer)))
    for number, model in enumerate(models):
        new = {id(weight): name for name, weight in model.named_parameters() if id(weight) in mine - names.keys()}
        prefix = f"model_{number}." if names else ""
        names |= {key: prefix + name for key, name in new.items()}
    groups = []
    count = 0
    for group in optimizer.param_groups:
        numbered = enumerate(group["params"], count)
        groups.append([names.get(id(weight), f"tensor_{number}") for number, weight in numbered])
        count += len(group["params"])
    return groups


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
