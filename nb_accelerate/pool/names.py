"""Find the names that a cell reads from the notebook. Pure: nothing is run."""

from __future__ import annotations
import __future__

import ast
import re
import warnings
from typing import TYPE_CHECKING

from nb_accelerate.pool.definite_assignment import DefiniteAssignment

if TYPE_CHECKING:
    from collections.abc import Iterable

_WORD = re.compile(r"[^\W\d]\w*")


def free_names(tree: ast.Module) -> set[str]:
    """Return the names that a cell may read before it has bound them. Built-in names are among them.

    Args:
        tree: the syntax tree of a cell that compiles.
    """
    analysis = DefiniteAssignment(_flags(tree))
    try:
        with warnings.catch_warnings():  # the cell has been compiled before, with its warnings
            warnings.simplefilter("ignore")
            analysis.block(tree.body, set())
        free = analysis.free
    except RecursionError:  # it is nested too deeply: then all names in it, rather than too few
        free = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {name for name in free | _in_magics(tree) if not name.startswith("__")}


def _flags(tree: ast.Module) -> int:
    """Return the compiler flags of a cell: ``await`` at its top level, and its ``__future__`` imports."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            for alias in statement.names:
                flags |= getattr(__future__, alias.name).compiler_flag
    return flags


def _in_magics(tree: ast.Module) -> set[str]:
    """Return the words in the arguments of magics: ``%timeit f(x)`` and ``!ls {folder}`` have become strings."""
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
