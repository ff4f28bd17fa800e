"""Find what a loop goes over. Pure: nothing is run."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nb_accelerate.magics.loop_calls import last_name, own_nodes, target_of

if TYPE_CHECKING:
    from nb_accelerate.magics.loop_calls import Scope

_AROUND_LOADERS = frozenset({"enumerate", "tqdm", "tqdm_notebook"})
"""Calls that give each batch of a loader once, in its order."""


def iterated(loop: ast.For | ast.comprehension, scope: Scope) -> str:
    """Return the name of what a loop goes over, also through enumerate and tqdm; empty if it has none."""
    over = _inside(loop.iter)
    for made in wrapped(loop, scope):
        over = _inside(made.value)
    return over.id if isinstance(over, ast.Name) else ""


def wrapped(loop: ast.For | ast.comprehension, scope: Scope) -> list[ast.Assign]:
    """Return the assignment of ``bar = tqdm(loader)``, for a loop over ``bar`` or ``enumerate(bar)``."""
    return _wraps(_inside(loop.iter), scope)


def _inside(over: ast.expr) -> ast.expr:
    while isinstance(over, ast.Call) and last_name(over.func) in _AROUND_LOADERS and over.args:
        over = over.args[0]
    return over


def _wraps(over: ast.expr, scope: Scope) -> list[ast.Assign]:
    if not isinstance(over, ast.Name):
        return []
    found = [one for one in own_nodes(scope) if isinstance(one, ast.Assign) and target_of(one) == over.id]
    [made] = found if len(found) == 1 else [None]
    is_wrapped = made and isinstance(made.value, ast.Call) and last_name(made.value.func) in _AROUND_LOADERS
    return [made] if made and is_wrapped else []
