"""Find the blocks of a model: the modules that a sharding engine gathers one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin

# Modules without a `forward`, before which nothing could be gathered.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

# Modules that read the parameters of their parts and never call these, so that nothing would gather a part.
_READERS = (nn.MultiheadAttention,)


def find_blocks(model: nn.Module, options: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """Return the blocks that the options ask for, inner ones first, without the model itself.

    It is an error if they ask for blocks that the model has not, or for blocks that share a parameter.
    """
    policy = options.auto_wrap_policy
    if policy == "no_wrap":
        return []
    if callable(policy):
        blocks, asked = blocks_by_policy(model, policy), f"auto_wrap_policy={getattr(policy, '__name__', policy)}"
    elif options.min_num_params is not None and policy != "transformer_based_wrap":
        blocks, asked = blocks_by_size(model, options.min_num_params), f"min_num_params={options.min_num_params}"
    elif options.transformer_cls_names_to_wrap:
        blocks, asked = blocks_by_class(model, options.transformer_cls_names_to_wrap), ""
    elif policy is not None:
        blocks, asked = blocks_by_class(model), f"auto_wrap_policy={policy!r}, with its _no_split_modules,"
    else:
        return untied(model, blocks_by_class(model) or repeated_blocks(model))
    never_called = {
        id(part) for module in model.modules() if isinstance(module, _READERS) for part in module.children()
    }
    blocks = [block for block in blocks if id(block) not in never_called]
    if not blocks:
        raise ConfigError(
            f"{asked} finds no block in {type(model).__name__}, so nothing would be sharded by itself. Write "
            "transformer_cls_names_to_wrap=[...] with the classes of its layers, or auto_wrap_policy='no_wrap', and "
            "the model is one block."
        )
    check_ties(model, blocks)
    return blocks


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model repeats in a row, such as the layers of a transformer."""
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        children = list(module)
        if len({type(child) for child in children}) == 1 and any(True for _ in children[0].children()):
            blocks += children
            inside |= {id(part) for child in children for part in child.modules()}
    return blocks


def blocks_by_policy(model: nn.Module, policy: Callable[..., bool]) -> list[nn.Module]:
    """Return the modules that a function chooses, inner ones first, without the model itself.

    It is called as those of `torch.distributed.fsdp.wrap`: with a module, ``recurse`` (whether its parts are to be
    looked at; else whether it is a block itself), and the number of its parameters outside of blocks.
    """
    blocks: list[nn.Module] = []
    counted: set[int] = set()  # parameters inside of a block
    seen: set[int] = set()

    def rest(module: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter in module.parameters() if id(parameter) not in counted]

    def visit(module: nn.Module) -> None:
        seen.add(id(module))
        if policy(module=module, recurse=True, nonwrapped_numel=sum(parameter.numel() for parameter in rest(module))):
            for child in module.children():
                if id(child) not in seen:
                    visit(child)
        parameters = rest(module)
        if module is model or isinstance(module, _CONTAINERS) or not parameters:
            return
        if policy(module=module, recurse=False, nonwrapped_numel=sum(parameter.numel() for parameter in parameters)):
            blocks.append(module)
            counted.update(map(id, parameters))

    visit(model)
    return blocks


def blocks_by_class(model: nn.Module, names: Iterable[str] | None = None) -> list[nn.Module]:
    """Return the modules of given classes, inner ones first, without the model itself.

    By default the classes that models of transformers name in ``_no_split_modules``; without it there are none.
    """
    no_split = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    wanted = set(no_split if names is None else names)
    blocks = [part for part in model.modules() if part is not model and type(part).__name__ in wanted]
    missing = wanted - {type(part).__name__ for part in blocks}
    if names is not None and missing:
        kinds = sorted({type(part).__name__ for part in model.modules() if any(part.children())})
        raise ConfigError(
            f"transformer_cls_names_to_wrap names {', '.join(sorted(missing))}, and {type(model).__name__} has no "
            f"such part. Its parts with parts of their own are: {', '.join(kinds)}."
        )
    return blocks[::-1]


def blocks_by_size(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Return modules with so many parameters, not counting those of blocks inside of them; inner ones first."""

    def policy(*, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:  # noqa: ARG001 - torch's names
        return recurse or nonwrapped_numel >= min_num_params

    return blocks_by_policy(model, policy)


def untied(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with what is outside of them, each once."""
    homes: dict[int, set[int]] = {}  # of a parameter: the modules that hold it
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            homes.setdefault(id(parameter), set()).add(id(module))
    kept = []
    for block in dict.fromkeys(blocks):
        inside = {id(part) for part in block.modules()}
        if all(homes[id(parameter)] <= inside for parameter in block.parameters()):
            kept.append(block)
    return kept


def check_ties(model: nn.Module, blocks: Collection[nn.Module]) -> None:
    """Raise `ConfigError` for a parameter of several blocks: each would be given a shard of its own, no longer tied.

    What is in none of the blocks is one more block.
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
