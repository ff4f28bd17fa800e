"""Which names a cell, or a function, reads from the notebook. Pure: on an AST and on code objects; nothing is run."""

from __future__ import annotations
import __future__

import ast
import re
import warnings
from typing import TYPE_CHECKING

from nb_accelerate.pool.assignments import Reader, names_in

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["free_names", "names_in"]

_WORD = re.compile(r"[^\W\d]\w*")


def free_names(tree: ast.Module) -> set[str]:
    """Names that must have a value before the cell runs, if they are not built in.

    A name that the cell binds first is not free. One that it may bind, in a branch, is.

    Args:
        tree: of a cell that compiles.
    """
    reader = Reader(_flags(tree))
    try:
        with warnings.catch_warnings():  # the compiler has had its say about the cell
            warnings.simplefilter("ignore")
            reader.block(tree.body, set())
        free = reader.free
    except RecursionError:  # deeper than Python code can follow: all names that occur, rather than too few
        free = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {name for name in free | _in_magics(tree) if not name.startswith("__")}


def _flags(tree: ast.Module) -> int:
    """How the cell is compiled: with ``await`` at its top level, and with its ``__future__`` imports."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            for alias in statement.names:
                flags |= getattr(__future__, alias.name).compiler_flag
    return flags


def _in_magics(tree: ast.Module) -> set[str]:
    """Words in the text of magics: ``%timeit f(x)`` and ``!ls {folder}`` are strings by now."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        shell = node.func.value
        if isinstance(shell, ast.Call) and isinstance(shell.func, ast.Name) and shell.func.id == "get_ipython":
            arguments = node.args[1:] if node.func.attr.endswith("_magic") else node.args  # its name is first
            found.update(_words(argument.value for argument in arguments if isinstance(argument, ast.Constant)))
    return found


def _words(values: Iterable[object]) -> Iterable[str]:
    for value in values:
        if isinstance(value, str):
            yield from _WORD.findall(value)
