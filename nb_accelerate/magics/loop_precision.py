"""Find the mixed precision of a training loop: its autocast blocks and its GradScaler. Pure: nothing is run.

What is read becomes ``Accelerator(mixed_precision=...)``, so there must be one dtype, and the model must be called in
autocast blocks wherever it is trained.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.magics.loop_autocast import condition_of, dtype_of, has_plain_device, scaler_condition
from nb_accelerate.magics.loop_calls import (
    above,
    functions_of,
    is_method,
    last_name,
    own_nodes,
    parameters,
    unsure,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.magics.loop_calls import Scope

CLIPS = ("clip_grad_norm_", "clip_grad_value_")
"""Functions of torch that clip gradients, and methods of an `Accelerator` that do."""

_OF_SCALER = frozenset({"get_scale", "state_dict", "load_state_dict", "is_enabled"})
"""Methods that are called on the scaler of the accelerator instead."""


@dataclass(frozen=True)
class MixedPrecision:
    """The mixed precision of a loop; every node is one of its cell.

    Attributes:
        argument: source of the argument ``mixed_precision``; empty if the loop computes in the dtype of the model.
        blocks: the calls of autocast that ``accelerator.autocast()`` takes the place of.
        scaler: name of the GradScaler where it is made; empty if there is none.
        scaler_made: the statement that makes it; None if there is none, or another cell makes it.
        outside: calls of the model outside of autocast blocks, which will compute in the mixed precision too.
    """

    argument: str = ""
    blocks: tuple[ast.Call, ...] = ()
    scaler: str = ""
    scaler_made: ast.Assign | None = None
    outside: tuple[ast.Call, ...] = ()


def unscaled_loss(backward: ast.Call) -> ast.expr:
    """Return the loss whose gradients are computed: ``loss`` in ``scaler.scale(loss).backward()`` too."""
    assert isinstance(backward.func, ast.Attribute)
    value = backward.func.value
    if isinstance(value, ast.Call) and is_method(value, "scale") and len(value.args) == 1 and not value.keywords:
        return value.args[0]
    return value


def read_precision(
    tree: ast.Module,
    names: Mapping[Scope, Mapping[str, str]],
    *,
    model: str,
    optimizer: str,
    scaler: str,
    scaler_made: ast.Assign | None,
    loop: ast.For,
    backward: ast.Call,
) -> MixedPrecision:
    """Find the mixed precision of a loop.

    Args:
        tree: of the cell.
        names: of each scope that uses model, optimizer, loader or scaler: the names where they are made by those there.
        model: its name where it is made.
        optimizer: likewise.
        scaler: likewise; empty if there is none.
        scaler_made: the statement that makes it; None if there is none, or another cell makes it.
        loop: over the batches.
        backward: the call that computes gradients.

    Raises:
        ConfigError: a part of it is not understood; with its line.
    """
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    _check_scaler(tree, names, optimizer, scaler, scaler_made, backward, parents)
    blocks = _blocks(tree, names, parents)
    conditions = {condition_of(call, tree, names) for call in blocks}
    made = scaler_made.value if scaler_made is not None else None
    if isinstance(made, ast.Call):
        enabled = scaler_condition(made, tree, names)
        if blocks and enabled != "False" and {enabled} != conditions:
            raise unsure(made, "GradScaler and autocast are enabled by different conditions")
        if not blocks and enabled != "False":
            raise unsure(made, "GradScaler without an autocast block in the loop, so the dtype is not known")
    if not blocks:
        if scaler and scaler_made is None:
            raise unsure(loop, f"{scaler!r} scales the loss, but there is no autocast block, so the dtype is not known")
        # Accelerator() would take the precision of an earlier one of this process.
        return MixedPrecision('"no"' if _names_autocast(names) or scaler else "", (), scaler, scaler_made)
    _check_clipping(names, scaler, parents)
    if len(conditions) > 1:
        raise unsure(blocks[-1], "autocast blocks that are enabled by different conditions")
    dtypes = [dtype_of(call, tree, made if isinstance(made, ast.Call) else None) for call in blocks]
    if len(set(dtypes)) > 1:
        raise unsure(blocks[-1], f"autocast blocks of {' and '.join(sorted(set(dtypes)))}; the accelerator has one")
    [condition], dtype = conditions, dtypes[0]
    argument = f'"{dtype}"' if condition == "True" else f'"{dtype}" if {condition} else "no"'
    if scaler and argument != '"fp16"':
        _refuse_scaler_methods(names, scaler, argument)
    return MixedPrecision(argument, tuple(blocks), scaler, scaler_made, _calls_outside(names, model, loop, blocks))


def _check_scaler(
    tree: ast.Module,
    names: Mapping[Scope, Mapping[str, str]],
    optimizer: str,
    scaler: str,
    scaler_made: ast.Assign | None,
    backward: ast.Call,
    parents: Mapping[ast.AST, ast.AST],
) -> None:
    """Raise the error for a use of a scaler that is not understood."""
    assert isinstance(backward.func, ast.Attribute)
    scaled = unscaled_loss(backward) is not backward.func.value
    scopes = [where for where, local in names.items() if scaler and scaler in local.values()]
    functions = functions_of(tree)
    annotations = {
        node
        for where in scopes
        if isinstance(where, ast.FunctionDef)
        for one in parameters(where)
        if names[where].get(one.arg) == scaler and one.annotation is not None
        for node in ast.walk(one.annotation)
    }
    maker = scaler_made.value if scaler_made is not None else None
    for node in ast.walk(tree):
        is_class = isinstance(node, (ast.Name, ast.Attribute)) and last_name(node) == "GradScaler"
        if is_class and node not in annotations and not (isinstance(maker, ast.Call) and node is maker.func):
            raise unsure(
                node,
                "only one GradScaler is understood, and only as a statement beside the optimizer or in the function of "
                "the loop, as in scaler = GradScaler()",
            )
    steps = 0
    for where in scopes:
        for node in own_nodes(where):
            if not (isinstance(node, ast.Name) and names[where].get(node.id) == scaler):
                continue
            if isinstance(node.ctx, ast.Store):
                continue  # by its maker; local_names refuses others
            upper = parents[node]
            if _is_handed_on(node, functions, parents):
                continue
            call = parents.get(upper)
            if not (isinstance(upper, ast.Attribute) and isinstance(call, ast.Call) and call.func is upper):
                raise unsure(node, f"a use of {node.id!r} that is not understood; call its methods only")
            of_optimizer = len(call.args) == 1 and names[where].get(ast.unparse(call.args[0])) == optimizer
            alone = isinstance(parents[call], ast.Expr) and not call.keywords
            known = (
                (upper.attr == "scale" and call is backward.func.value)
                or (upper.attr in ("step", "unscale_") and of_optimizer and alone)
                or (upper.attr == "update" and not call.args and alone)
                or upper.attr in _OF_SCALER
            )
            if not known:
                raise unsure(call, f"{ast.unparse(call)!r} is not understood")
            steps += upper.attr == "step"
    if scaled and not any(
        names[where].get(ast.unparse(backward.func.value.func.value)) == scaler  # type: ignore[attr-defined]
        for where in scopes
    ):
        raise unsure(backward, "the scaler of the loss is made elsewhere; make it beside the optimizer, or pass it")
    if bool(steps) != scaled:
        raise unsure(backward, "a loss is scaled and its optimizer is stepped by one GradScaler, or neither is")


def _check_clipping(names: Mapping[Scope, Mapping[str, str]], scaler: str, parents: Mapping[ast.AST, ast.AST]) -> None:
    """Raise the error for clipping of gradients that are still multiplied by the loss scale."""
    for where, local in names.items():
        calls = [node for node in own_nodes(where) if isinstance(node, ast.Call)]
        unscaled = [
            one
            for one in calls
            if is_method(one, "unscale_") and local.get(ast.unparse(one.func.value)) == scaler  # type: ignore[attr-defined]
        ]
        for clip in calls:
            if not scaler or last_name(clip.func) not in CLIPS:
                continue
            around = set(above(clip, parents))
            if not any(parents[parents[one]] in around and one.lineno <= clip.lineno for one in unscaled):
                raise unsure(
                    clip,
                    f"{last_name(clip.func)} clips gradients that are multiplied by the loss scale; write "
                    "scaler.unscale_(optimizer) above it, and both where the scaler steps",
                )


def _names_autocast(names: Mapping[Scope, Mapping[str, str]]) -> bool:
    return any(
        isinstance(node, ast.Call) and last_name(node.func) == "autocast"
        for where in names
        for node in own_nodes(where)
    )


def _is_handed_on(node: ast.Name, functions: Mapping[str, ast.FunctionDef], parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether a name is an argument of a call of a function of the cell."""
    call = parents[node]
    if isinstance(call, ast.keyword):
        call = parents[call]
    is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in functions
    return is_call and call.func is not node  # type: ignore[attr-defined]


def _refuse_scaler_methods(names: Mapping[Scope, Mapping[str, str]], scaler: str, argument: str) -> None:
    for where, local in names.items():
        for call in own_nodes(where):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            if call.func.attr in _OF_SCALER and local.get(ast.unparse(call.func.value)) == scaler:
                raise unsure(call, f"with mixed_precision={argument} there may be no scaler; take this out first")


def _blocks(
    tree: ast.Module, names: Mapping[Scope, Mapping[str, str]], parents: Mapping[ast.AST, ast.AST]
) -> list[ast.Call]:
    """Return the calls of autocast whose blocks are in scopes that use the model, but for those that turn it off."""
    followed = {node for where in names for node in own_nodes(where)}
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, (ast.Name, ast.Attribute)) and last_name(node) == "autocast"):
            continue
        call = parents[node]
        if isinstance(call, ast.Attribute):
            continue  # torch.amp.autocast_mode and the like
        if not (isinstance(call, ast.Call) and call.func is node and isinstance(parents[call], ast.withitem)):
            raise unsure(node, "autocast that is not written as a block; write with autocast(...):")
        if any(isinstance(one, ast.ClassDef) for one in above(node, parents)):
            if condition_of(call, tree, names) != "False":
                raise unsure(node, "autocast in a class; put the block around the call of the model")
        elif node in followed:
            if condition_of(call, tree, names) != "False":
                found.append(call)
        elif not has_plain_device(call):
            raise unsure(
                call, "autocast in a function that the model is not followed to, with a device that may change"
            )
    return sorted(found, key=lambda one: one.lineno)


def _calls_outside(
    names: Mapping[Scope, Mapping[str, str]], model: str, loop: ast.For, blocks: list[ast.Call]
) -> tuple[ast.Call, ...]:
    """Return the calls of the model outside of autocast blocks, if none of them is in the training loop.

    Raises:
        ConfigError: one is, or there is no block in the loop or around it.
    """
    with_blocks = [
        one
        for where in names
        for one in own_nodes(where)
        if isinstance(one, ast.With) and any(item.context_expr in blocks for item in one.items)
    ]
    inside = {node for one in with_blocks for statement in one.body for node in ast.walk(statement)}
    in_loop = set(ast.walk(loop))
    if not any(one in in_loop for one in with_blocks) and loop not in inside:
        raise unsure(blocks[0], "there is no autocast block in the training loop, only elsewhere")
    found = [
        call
        for where, local in names.items()
        for call in own_nodes(where)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and local.get(call.func.id) == model
        and call not in inside
    ]
    for call in found:
        if call in in_loop:
            raise unsure(call, "the model is called outside of the autocast block; the accelerator knows one precision")
    return tuple(found)
