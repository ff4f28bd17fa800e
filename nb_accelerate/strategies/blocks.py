"""Find the blocks of a model: the modules that a sharding engine gathers one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a ``forward``, before which nothing could be gathered."""


def blocks_by_class(model: nn.Module, names: Iterable[str] | None = None) -> list[nn.Module]:
    """Return the modules of given classes, inner ones first.

    Args:
        model: whose parts; the model itself is not among the blocks.
        names: of classes. Default: what models of transformers call ``_no_split_modules``; without it there are none.

    Raises:
        ConfigError: no part of the model is of one of the classes.
    """
    known = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    wanted = set(known if names is None else names)
    found = [part for part in model.modules() if part is not model and type(part).__name__ in wanted]
    missing = wanted - {type(part).__name__ for part in found}
    if names is not None and missing:
        kinds = sorted({type(part).__name__ for part in model.modules() if any(part.children())})
        raise ConfigError(
            f"transformer_cls_names_to_wrap names {', '.join(sorted(missing))}, and {type(model).__name__} has no "
            f"such part. Its parts with parts of their own are: {', '.join(kinds)}."
        )
    return found[::-1]


def blocks_by_size(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Return modules with at least so many parameters, not counting those of blocks inside of them; inner ones first.

    Args:
        model: whose parts; the model itself is not among the blocks.
        min_num_params: elements of all parameters of a block together.
    """
    found: list[nn.Module] = []
    counted: set[int] = set()  # parameters inside of a block

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        if module is model or isinstance(module, _CONTAINERS):
            return
        rest = [parameter for parameter in module.parameters() if id(parameter) not in counted]
        if sum(parameter.numel() for parameter in rest) >= min_num_params:
            found.append(module)
            counted.update(map(id, rest))

    visit(model)
    return found


def check_ties(model: nn.Module, blocks: Collection[nn.Module]) -> None:
    """Refuse a parameter that belongs to several blocks: each would be given a shard of its own, no longer tied.

    Args:
        model: the whole.
        blocks: parts of it; what is in none of them is one more block.

    Raises:
        ConfigError: there is such a parameter.
    """
    inside = {id(block) for block in blocks}
    owner: dict[int, tuple[int, str]] = {}  # of a parameter: its block, and its first name

    def visit(module: nn.Module, block: nn.Module, prefix: str) -> None:
        block = module if id(module) in inside else block
        for name, parameter in module.named_parameters(prefix, recurse=False):
            first = owner.setdefault(id(parameter), (id(block), name))
            if first[0] != id(block):
                raise ConfigError(
                    f"{first[1]} and {name} of this {type(model).__name__} are one parameter (tied weights) in two "
                    "blocks, which cannot be sharded separately. Choose blocks that hold both or neither: change "
                    "transformer_cls_names_to_wrap or min_num_params, or write auto_wrap_policy='no_wrap'."
                )
        for name, child in module.named_children():
            visit(child, block, f"{prefix}.{name}" if prefix else name)

    visit(model, model, "")
