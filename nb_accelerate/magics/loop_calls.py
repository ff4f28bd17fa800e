"""Find which functions of a cell get its model, optimizer and loader, and by what names. Pure: nothing is run."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

Scope: TypeAlias = ast.Module | ast.FunctionDef
"""The cell, or a function that is defined in it and not inside another one."""

_Node = TypeVar("_Node", bound=ast.AST)


def unsure(node: ast.AST, why: str) -> ConfigError:
    """Return the error that says where a loop is not understood, and why."""
    return ConfigError(f"line {getattr(node, 'lineno', 1)}: {why}. Nothing was changed")


def walk(root: ast.AST, kind: type[_Node]) -> Iterator[_Node]:
    """Yield the nodes of one kind below a node."""
    return (one for one in ast.walk(root) if isinstance(one, kind))


def is_method(call: ast.Call, name: str) -> bool:
    """Whether a call is that of an attribute of this name."""
    return isinstance(call.func, ast.Attribute) and call.func.attr == name


def last_name(function: ast.expr) -> str:
    """Return the name of a function, without what stands before it."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def target_of(statement: ast.stmt) -> str:
    """Return the name that a statement assigns to; empty if it does not assign to one name."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        [target] = statement.targets
        return target.id if isinstance(target, ast.Name) else ""
    return ""


def above(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes that a node is in, from the inside to the outside."""
    while node in parents:
        node = parents[node]
        yield node


def own_nodes(scope: Scope) -> Iterator[ast.AST]:
    """Yield the nodes of a function, or those of a cell that are in none of its functions."""
    if isinstance(scope, ast.FunctionDef):
        yield from ast.walk(scope)
    else:
        for statement in scope.body:
            if not isinstance(statement, ast.FunctionDef):
                yield from ast.walk(statement)


def functions_of(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Return the functions that a cell defines, by name."""
    return {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}


def the_call(function: ast.FunctionDef, tree: ast.Module) -> tuple[ast.Call, Scope] | None:
    """Return the only call of a function in its cell, and the scope that it is in; None if nothing names it.

    Raises:
        ConfigError: there are more, or the function is handed on.
    """
    scopes: list[Scope] = [tree, *functions_of(tree).values()]
    found = [
        (call, scope)
        for scope in scopes
        for call in own_nodes(scope)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == function.name
    ]
    called = [call.func for call, _ in found]
    for name in walk(tree, ast.Name):
        if name.id == function.name and name not in called:
            raise unsure(name, f"{function.name} is used without a call, so its arguments are not known")
    if len(found) > 1:
        raise unsure(
            found[1][0], f"a second call of {function.name}; only a function that is called once is understood"
        )
    return found[0] if found else None


def bind(call: ast.Call, function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Return the arguments of a call by the names that they have in the function; defaults are left out.

    Raises:
        ConfigError: the call or the function takes arguments by ``*`` or ``**``, or too many.
    """
    of = function.args
    if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
        raise unsure(call, f"{ast.unparse(call)!r} has arguments with a star; write each of them")
    positional = [one.arg for one in (*of.posonlyargs, *of.args)]
    named = {one.arg: one.value for one in call.keywords if one.arg is not None}
    if len(call.args) > len(positional) or not set(named) <= {*positional, *(one.arg for one in of.kwonlyargs)}:
        raise unsure(call, f"{ast.unparse(call)!r} has arguments that {function.name} does not name")
    return {**dict(zip(positional, call.args, strict=False)), **named}


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    """Return the parameters of a function that have a name of their own in a call."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def local_names(scope: Scope, outer: Scope, tree: ast.Module, shared: Collection[str]) -> dict[Scope, dict[str, str]]:
    """Follow names through the calls of a cell.

    Args:
        scope: that the loop is in.
        outer: the scope that makes what the names stand for.
        tree: of the cell.
        shared: the names, in `outer`.

    Returns:
        For `outer`, `scope` and each function that one of them gets to, the names in `shared` by the names there.

    Raises:
        ConfigError: a function gets different things by one name, gives one of the names something else, or is
            called in a way that is not understood.
    """
    functions = functions_of(tree)
    found: dict[Scope, dict[str, str]] = {outer: {name: name for name in shared}}
    if isinstance(outer, ast.Module):
        for function in functions.values():
            own = {one.arg for one in parameters(function)}
            own |= {one.id for one in walk(function, ast.Name) if isinstance(one.ctx, ast.Store)}
            used = {one.id for one in walk(function, ast.Name)} & set(shared) - own
            found[function] = {name: name for name in used}
    given: dict[tuple[str, str], str] = {}
    waiting = list(found)
    while waiting:
        here = waiting.pop()
        for call in own_nodes(here):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in functions):
                continue
            function = functions[call.func.id]
            if function in (here, outer):
                continue
            if not any(name.id in found[here] for name in walk(call, ast.Name)):
                values: Mapping[str, ast.expr] = {}
            else:
                values = bind(call, function)
            for parameter, value in values.items():
                name = found[here].get(value.id, "") if isinstance(value, ast.Name) else ""
                if not name:
                    _refuse_hidden(value, found[here])
                if given.setdefault((function.name, parameter), name) != name:
                    raise unsure(call, f"{function.name} gets different things as {parameter!r} in its calls")
                if name and found.setdefault(function, {}).get(parameter) != name:
                    found[function][parameter] = name
                    waiting.append(function)
    for where, names in found.items():
        for one in own_nodes(where) if where is not outer else ():
            if isinstance(one, ast.Name) and one.id in names and isinstance(one.ctx, ast.Store):
                raise unsure(one, f"{one.id!r} is assigned again in a function that gets it")
    found.setdefault(scope, {})
    return found


def _refuse_hidden(value: ast.expr, names: Mapping[str, str]) -> None:
    """Refuse an argument that is made of one of the names, other than its length or what it returns."""
    plain: set[ast.AST] = set()
    for call in walk(value, ast.Call):
        plain.add(call.func)
        if ast.unparse(call.func) == "len":
            plain.update(call.args)
    for name in walk(value, ast.Name):
        if name.id in names and name not in plain:
            raise unsure(value, f"{ast.unparse(value)!r} is passed to a function; pass {name.id} by its name")
