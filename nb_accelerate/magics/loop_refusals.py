"""What a plain training loop must not have to be rewritten. Pure: nothing is run."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nb_accelerate.magics.loop_calls import above, is_method, last_name, own_nodes, unsure, walk
from nb_accelerate.magics.loop_loader import iterated

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from nb_accelerate.magics.loop_calls import Scope

_NOT_HERE = {
    "DistributedDataParallel": "is wrapped by accelerator.prepare already",
    "DDP": "is wrapped by accelerator.prepare already",
    "DataParallel": "holds copies of the model in one process",
    "DistributedSampler": "splits the rows, which the prepared loader does",
    "init_process_group": "makes the process group, which Accelerator() does",
    "set_autocast_dtype": "chooses the precision, which Accelerator(mixed_precision='bf16') does",
    "set_device": "chooses a device, which Accelerator() does",
    "no_sync": "belongs to a loop that is distributed already",
}
"""Names that a plain loop does not have, and what they do."""

_BY_HAND = {
    "LBFGS": "steps with a closure, which is not understood. By hand: call accelerator.backward(loss) in the closure",
    "ReduceLROnPlateau": "needs a metric that is the same on all ranks. By hand: accelerator.reduce(metric, 'mean')",
    "Accelerator": "is there already",
}
"""Names of what is not rewritten, and why."""

_OF_MODEL = frozenset(
    {
        "train",
        "eval",
        "parameters",
        "named_parameters",
        "zero_grad",
        "state_dict",
        "to",
        "cuda",
        "cpu",
        "requires_grad_",
        "modules",
        "training",
    }
)
"""Attributes of a model that its wrapper has too, or that are rewritten."""

SHOWING = frozenset({"print", "set_description", "set_postfix", "set_postfix_str"})
"""Calls that show numbers and return nothing."""


def refuse_names(tree: ast.Module) -> None:
    """Raise the error for the first name that a plain loop does not have."""
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in _NOT_HERE:
            raise unsure(node, f"{name} {_NOT_HERE[name]}; take it out first")
        if name in _BY_HAND:
            raise unsure(node, f"{name} {_BY_HAND[name]}")
        if isinstance(node, ast.Name) and name == "accelerator":
            raise unsure(node, "the name 'accelerator' is used already")


def refuse_attributes(
    scope: Scope,
    names: Mapping[str, str],
    model: str,
    loader: str,
    begin: int,
    parents: Mapping[ast.AST, ast.AST],
    divisors: Collection[ast.AST],
) -> None:
    """Raise the error for an attribute that a prepared model lacks, or that counts the rows of all ranks.

    Args:
        scope: whose nodes are looked at.
        names: what the names of `scope` stand for.
        model: its name in the scope that makes it.
        loader: likewise.
        begin: the first line from which the model is prepared.
        parents: of each node of the cell.
        divisors: nodes that divide numbers of all ranks.
    """
    for one in own_nodes(scope):
        if not (isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)):
            continue
        name, stands_for = one.value.id, names.get(one.value.id)
        if stands_for == model and one.attr not in _OF_MODEL and one.lineno >= begin:
            raise unsure(one, f"{name}.{one.attr}: the wrapper of a distributed model has no such attribute")
        if stands_for == loader and one.attr == "dataset" and not _is_shown(one, scope, parents, divisors):
            raise unsure(one, f"{name}.dataset counts the rows of all ranks; write len({name}) for the batches")


def _is_shown(node: ast.AST, scope: Scope, parents: Mapping[ast.AST, ast.AST], divisors: Collection[ast.AST]) -> bool:
    """Whether a value only divides numbers of all ranks or is printed, by itself or by the one name that it gets."""
    if _is_used_rightly(node, parents, divisors):
        return True
    for one in above(node, parents):
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and len(one.targets) == 1:
            loads = [
                name
                for name in own_nodes(scope)
                if isinstance(name, ast.Name) and name.id == one.targets[0].id and isinstance(name.ctx, ast.Load)
            ]
            return all(_is_used_rightly(name, parents, divisors) for name in loads)
    return False


def _is_used_rightly(node: ast.AST, parents: Mapping[ast.AST, ast.AST], divisors: Collection[ast.AST]) -> bool:
    return node in divisors or any(
        isinstance(up, ast.Call) and last_name(up.func) in SHOWING for up in above(node, parents)
    )


def passes_on(scope: Scope, names: Mapping[str, str], loader: str, functions: Collection[str]) -> bool:
    """Whether a function only hands the loader to other functions of the cell, or asks its length."""
    handed = {
        value
        for call in own_nodes(scope)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        for value in (*call.args, *(one.value for one in call.keywords))
        if call.func.id in functions or call.func.id == "len"
    }
    uses = [one for one in own_nodes(scope) if isinstance(one, ast.Name) and names.get(one.id) == loader]
    return all(one in handed for one in uses)


def refuse_second_loop(scope: Scope, names: Mapping[str, str], loader: str, loop: ast.For, begin: int) -> None:
    """Raise the error for another loop over the prepared loader, whose sums would be those of one rank.

    Args:
        scope: whose nodes are looked at.
        names: what the names of `scope` stand for.
        loader: its name in the scope that makes it.
        loop: that trains.
        begin: the first line from which the loader is prepared.
    """
    for one in own_nodes(scope):
        if isinstance(one, (ast.For, ast.comprehension)) and one is not loop:
            name = iterated(one, scope)
            if names.get(name) == loader and one.iter.lineno >= begin:
                raise unsure(
                    one.iter,
                    f"a second loop over {name} would see the rows of one rank only. Make a second DataLoader of the "
                    "same rows for it, which every rank reads whole",
                )


def refuse_elsewhere(tree: ast.Module, names: Mapping[Scope, Mapping[str, str]]) -> None:
    """Raise the error for weights that are saved by a function which nothing passes the model to."""
    inside = {node for scope in names for node in own_nodes(scope)}
    for call in walk(tree, ast.Call):
        if call not in inside and (is_method(call, "state_dict") or ast.unparse(call.func) == "torch.save"):
            raise unsure(call, f"{ast.unparse(call)!r} is outside the function that trains, and may get its model")
