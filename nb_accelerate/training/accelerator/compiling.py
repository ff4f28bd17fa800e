"""Compile models with `torch.compile`, whole or block by block."""

from __future__ import annotations

import copy
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.strategies.blocks import repeated_blocks

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn

    from nb_accelerate.base.config.dynamo import TorchDynamoPlugin
    from nb_accelerate.base.devices import DeviceKind


def compiled(model: nn.Module, plugin: TorchDynamoPlugin, kind: DeviceKind) -> nn.Module:
    """Return a model compiled as the plugin says; one that is compiled already is returned as it is."""
    # Called last by `prepare`, around the wrapper of the strategy, so that torch sees where gradients are exchanged.
    if not plugin.is_on or hasattr(model, "_orig_mod"):
        return model
    arguments = plugin.to_compile()
    if kind.compile_backends and arguments["backend"] not in kind.compile_backends:
        raise ConfigError(
            f"dynamo_backend={arguments['backend']!r} does not compile for an {kind.label}. Write one of "
            f"{', '.join(map(repr, kind.compile_backends))}, or leave it out."
        )
    if plugin.use_regional_compilation:
        blocks = repeated_blocks(model)
        for block in blocks:
            block.compile(**arguments)  # in place; equal blocks share the code of the first
        if blocks:
            return model
    whole: Any = torch.compile(model, **arguments)
    return whole  # type: ignore[no-any-return]  # torch calls it a callable; given a module it is one


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a model whose repeated blocks are compiled, each by itself, and the parts beside them too.

    Equal blocks share the code of the first, so a deep model compiles as fast as a shallow one. The model that was
    given is not compiled; both have the same weights, buffers and hooks.
    ``unwrap_model(model, keep_torch_compile=False)`` returns it.

    Args:
        module: the model. One without repeated blocks is compiled whole.
        **compile_kwargs: those of `torch.compile`.
    """
    blocks = {id(block) for block in repeated_blocks(module)}
    compiled = _with_compiled(module, blocks, compile_kwargs)
    if not hasattr(compiled, "_orig_mod"):
        vars(compiled)["_orig_mod"] = module  # not as a part of it, whose weights would count twice
    return compiled


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks of a model, and the parts beside them, in place, and return the model.

    Hooks that are put on blocks afterwards run, as those of FSDP2 and DeepSpeed need.

    Args:
        module: the model. One without repeated blocks is compiled whole.
        **compile_kwargs: those of `torch.nn.Module.compile`.
    """
    blocks = {id(block) for block in repeated_blocks(module)}

    def visit(part: nn.Module) -> None:
        if id(part) in blocks or not any(id(inner) in blocks for inner in part.modules()):
            part.compile(**compile_kwargs)
            return
        for child in part.children():
            visit(child)

    visit(module)
    return module


compile_regions_deepspeed = compile_regions_fsdp2


def _with_compiled(module: nn.Module, blocks: Collection[int], arguments: dict[str, Any]) -> nn.Module:
    """Return a module that is compiled where it is a block or has none inside; around blocks, a shallow copy."""
    if id(module) in blocks or not any(id(part) in blocks for part in module.modules()):
        whole: Any = torch.compile(module, **arguments)
        return whole  # type: ignore[no-any-return]  # torch calls it a callable; given a module it is one
    around = copy.copy(module)
    for name, value in list(vars(around).items()):
        if isinstance(value, MethodType) and value.__self__ is module:  # a forward that was replaced, say
            setattr(around, name, MethodType(value.__func__, around))
    for table in ("_parameters", "_buffers"):
        setattr(around, table, dict(getattr(module, table)))
    around._modules = {  # noqa: SLF001 - torch has no other way to copy a module without its parts
        name: None if part is None else _with_compiled(part, blocks, arguments)
        for name, part in module._modules.items()  # noqa: SLF001
    }
    return around
