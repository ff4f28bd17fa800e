"""Rewrite the autocast blocks and the GradScaler of a loop to those of an `Accelerator`. Pure: text in, text out."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nb_accelerate.magics.loop_calls import last_name, own_nodes, parameters, walk
from nb_accelerate.magics.loop_precision import CLIPS

if TYPE_CHECKING:
    from nb_accelerate.magics.loop_calls import Scope
    from nb_accelerate.magics.loop_edits import Edits
    from nb_accelerate.magics.loop_reading import TrainingLoop


def accelerator_line(loop: TrainingLoop) -> str:
    """Return the line that makes the `Accelerator` of a loop."""
    argument = loop.precision.argument
    return f"accelerator = Accelerator({f'mixed_precision={argument}' if argument else ''})"


def scaler_names(loop: TrainingLoop, scope: Scope) -> set[str]:
    """Return the names of the GradScaler in a scope."""
    scaler = loop.precision.scaler
    return {here for here, there in loop.names.get(scope, {}).items() if scaler and there == scaler}


def rewrite_precision(loop: TrainingLoop, edits: Edits) -> None:
    """Replace autocast blocks, and put the accelerator in the place of the GradScaler."""
    for call in loop.precision.blocks:
        edits.replace(call, "accelerator.autocast()")
    _drop_statements(loop, edits)
    for scope in loop.names:
        scalers = scaler_names(loop, scope)
        if isinstance(scope, ast.FunctionDef):
            for arg in parameters(scope):
                if arg.arg in scalers:
                    edits.replace(arg, "accelerator")
        for node in own_nodes(scope):
            if isinstance(node, ast.Call) and scalers:
                _rewrite_call(node, scalers, edits)


def _rewrite_call(call: ast.Call, scalers: set[str], edits: Edits) -> None:
    function = call.func
    if isinstance(function, ast.Attribute) and ast.unparse(function.value) in scalers:
        if function.attr == "step":
            edits.replace(call, f"{ast.unparse(call.args[0])}.step()")
        elif function.attr == "unscale_":
            edits.replace(function, "accelerator.unscale_gradients")
        else:
            edits.replace(function.value, "accelerator.scaler")
    for value in call.args:
        if isinstance(value, ast.Name) and value.id in scalers:
            edits.replace(value, "accelerator")
    for named in call.keywords:
        if isinstance(named.value, ast.Name) and named.value.id in scalers:
            edits.replace(named, "accelerator=accelerator")


def _drop_statements(loop: TrainingLoop, edits: Edits) -> None:
    """Delete what the accelerator does by itself, and the statement that makes the GradScaler."""
    dropped: set[ast.stmt] = set() if loop.precision.scaler_made is None else {loop.precision.scaler_made}
    blocks = [block for node in ast.walk(loop.tree) for block in _statements(node)]
    for scope in loop.names:
        scalers = scaler_names(loop, scope)
        nodes = set(own_nodes(scope)) if scalers else set()
        for block in blocks:
            for one, after in zip(block, [*block[1:], None], strict=False):
                if one in nodes and _is_dropped(one, after, scalers):
                    dropped.add(one)
    for block in blocks:
        here = [one for one in block if one in dropped]
        for one in here:
            edits.delete(one, block, is_last=one is block[-1] and len(here) == len(block))


def _statements(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the blocks of statements of a node."""
    blocks = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
    return [block for block in blocks if isinstance(block, list)]


def _is_dropped(statement: ast.stmt, after: ast.stmt | None, scalers: set[str]) -> bool:
    """Whether the accelerator does by itself what a statement has the GradScaler do."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return False
    if ast.unparse(call.func.value) not in scalers:
        return False
    clips = after is not None and any(last_name(one.func) in CLIPS for one in walk(after, ast.Call))
    return call.func.attr == "update" or (call.func.attr == "unscale_" and clips)
