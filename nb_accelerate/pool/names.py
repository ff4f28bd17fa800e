"""Which names a cell, or a function, reads from the notebook. Pure: on an AST and on code objects.

The compiler knows better than any list of node types what a name means, so small pieces are compiled and their
instructions are read. Nothing is run.
"""

from __future__ import annotations

import ast
import dis
import re
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_READS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
_BINDS = {"STORE_NAME", "STORE_GLOBAL"}
_WORD = re.compile(r"[^\W\d]\w*")
_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def free_names(tree: ast.Module) -> set[str]:
    """Names that must have a value before the cell runs, if they are not built in.

    A name that the cell binds first is not free. One that it may bind, in a branch, is.
    """
    free: set[str] = set()
    _read_block(tree.body, set(), free)
    return {name for name in free | _in_magics(tree) if not name.startswith("__")}


def names_in(code: types.CodeType) -> set[str]:
    """Global names that a function reads, also in functions inside it."""
    return _reads_and_binds(code)[0]


def _read_block(statements: Sequence[ast.stmt], bound: set[str], free: set[str]) -> None:
    for statement in statements:
        if isinstance(statement, (ast.If, ast.While)):
            _read(statement.test, bound, free)
            for branch in (statement.body, statement.orelse):
                _read_block(branch, set(bound), free)
        elif isinstance(statement, (ast.For, ast.AsyncFor)):
            _read(statement.iter, bound, free)
            bound |= _targets(statement.target)
            for branch in (statement.body, statement.orelse):
                _read_block(branch, bound, free)
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                _read(item.context_expr, bound, free)
                if item.optional_vars is not None:
                    bound |= _targets(item.optional_vars)
            _read_block(statement.body, bound, free)
        elif isinstance(statement, ast.Try):
            _read_block(statement.body, set(bound), free)
            for handler in statement.handlers:
                if handler.type is not None:
                    _read(handler.type, bound, free)
                _read_block(handler.body, bound | {handler.name or ""}, free)
            for branch in (statement.orelse, statement.finalbody):
                _read_block(branch, set(bound), free)
        else:
            code = compile(ast.Module([statement], []), "<names>", "exec", flags=_FLAGS, dont_inherit=True)
            reads, binds = _reads_and_binds(code)
            free |= reads - bound
            bound |= binds


def _read(expression: ast.expr, bound: set[str], free: set[str]) -> None:
    code = compile(ast.Expression(expression), "<names>", "eval", flags=_FLAGS, dont_inherit=True)
    reads, binds = _reads_and_binds(code)
    free |= reads - bound
    bound |= binds


def _targets(node: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def _reads_and_binds(code: types.CodeType) -> tuple[set[str], set[str]]:
    """What is read before it is bound, and what is bound, in the order of the instructions."""
    reads: set[str] = set()
    binds: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS and instruction.argval not in binds:
            reads.add(instruction.argval)
        elif instruction.opname in _BINDS:
            binds.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, _ = _reads_and_binds(constant)
            # A class body binds names of its own; a function is called after the statement, when all is bound.
            reads |= inner - binds
    return reads, binds


def _in_magics(tree: ast.Module) -> set[str]:
    """Words in the text of magics: ``%timeit f(x)`` and ``!ls {folder}`` are strings by now."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("get_ipython()."):
            arguments = node.args[1:] if ast.unparse(node.func).endswith("_magic") else node.args  # its name is first
            found.update(_words(argument.value for argument in arguments if isinstance(argument, ast.Constant)))
    return found


def _words(values: Iterable[object]) -> Iterable[str]:
    for value in values:
        if isinstance(value, str):
            yield from _WORD.findall(value)
