"""Find the names that a cell, or a function, reads from the notebook. Pure: nothing is run.

Each statement is compiled by itself, and the compiler says what it reads and stores. A cell needs the names that it
reads before it has stored them. What is not certain counts as read: a name too many is sent, and nobody notices. Two
things are assumed, because nearly all code means them: the body of a ``for`` runs at least once, and the body of a
``with`` runs to its end.
"""

from __future__ import annotations

import ast
import dis
import inspect
import re
import types
import warnings
from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.worker.namespace import is_hidden

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WORD = re.compile(r"[^\W\d]\w*")
_DELETES = {"DELETE_NAME", "DELETE_GLOBAL"}
_READS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"} | _DELETES
_STORES = {"STORE_NAME", "STORE_GLOBAL"} | _DELETES  # code after a deletion fails, also if the notebook has the name
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))


def names_of(tree: ast.Module, flags: int = 0) -> tuple[set[str], set[str]]:
    """Return the names that a cell may read before it has stored them, and the names that it has stored at its end.

    Built-in names are among the first, and names that it deletes among the second.

    Args:
        flags: compiler flags that the cell sets by its ``__future__`` imports.
    """
    reader = _Reader(flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with warnings.catch_warnings():  # the cell has been compiled before, with its warnings
        warnings.simplefilter("ignore")
        stored = reader.block(tree.body, set())
    free = reader.free | _words_in_magics(tree)
    return {name for name in free if not (name.startswith("__") and is_hidden(name))}, stored


def names_in(code: types.CodeType) -> set[str]:
    """Return the global names that a function reads, with those of functions and classes defined in it."""
    return _own_names(code)[0].union(*map(names_in, _inner_codes(code)))


def calls_of(tree: ast.Module) -> set[str]:
    """Return the names of functions that statements of a cell call: ``reset()``, ``loss = step(x)``."""
    calls = [call for node in tree.body if isinstance(call := getattr(node, "value", None), ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def stored_by(function: object, variables: dict[str, Any]) -> set[str]:
    """Return the global names that a call of a function stores for certain; none if its globals are not ``variables``.

    The call of a generator or coroutine function runs none of its code.
    """
    if type(function) is not types.FunctionType or function.__globals__ is not variables:
        return set()
    runs_later = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return set() if function.__code__.co_flags & runs_later else _own_names(function.__code__)[1]


def _own_names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the global names that code itself reads before it has stored them, and those it stores for certain."""
    # Certain is what comes before the first branch.
    reads: set[str] = set()
    stores: set[str] = set()
    is_straight = not getattr(code, "co_exceptiontable", b"")
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS and instruction.argval not in stores:
            reads.add(instruction.argval)
        if instruction.opname in _STORES and is_straight:
            stores.add(instruction.argval)
        elif instruction.opcode in _JUMPS:
            is_straight = False
    return reads, stores


def _inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


class _Reader:
    """Follows statements, with the set of names that are stored by then."""

    def __init__(self, flags: int) -> None:
        self.free: set[str] = set()  # names that were read before they were stored
        self._flags = flags
        self._breaks: list[set[str]] = []  # what is stored at each ``break`` of the loop that is followed
        self._continues: list[set[str]] = []

    def block(self, statements: Sequence[ast.stmt], stored: set[str]) -> set[str]:
        """Follow statements one after the other; return what is stored at their end. `stored` is not changed."""
        stored = set(stored)
        for statement in statements:
            stored = self._statement(statement, stored)
        return stored

    def _statement(self, node: Any, stored: set[str]) -> set[str]:
        """Follow a statement; return what is stored after it. Those with blocks are taken apart."""
        if isinstance(node, ast.If):
            self._expression(node.test, stored)
            return self.block(node.body, stored) & self.block(node.orelse, stored)
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self._expression(node.iter, stored)
            before = set(stored)
            self._store(node.target, stored)
            return self._loop(node, stored, before, runs_once=True)
        if isinstance(node, ast.While):
            self._expression(node.test, stored)
            is_endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
            return self._loop(node, stored, stored, runs_once=is_endless)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._expression(item.context_expr, stored)
                self._store(item.optional_vars, stored)
            return self.block(node.body, stored)
        if isinstance(node, _TRY):
            end = self.block(node.orelse, self.block(node.body, stored))
            for handler in node.handlers:
                self._expression(handler.type, stored)
                end &= self.block(handler.body, stored | {handler.name or ""}) - {handler.name}
            self.block(node.finalbody, stored)  # also after an exception that nobody catches here
            return self.block(node.finalbody, end)
        if isinstance(node, ast.Match):
            self._expression(node.subject, stored)
            for case in node.cases:  # it may be that none is taken, so what they store is not certain afterwards
                patterns = ast.walk(case.pattern)
                captured = {getattr(part, "name", None) or getattr(part, "rest", None) for part in patterns}
                stored_here = stored | {name for name in captured if name}
                alone = ast.match_case(pattern=case.pattern, guard=case.guard, body=[ast.Pass()])
                self._simple(ast.Match(subject=ast.Constant(0), cases=[alone]), set(stored_here))
                self.block(case.body, stored_here)
            return stored
        if isinstance(node, (ast.Break, ast.Continue)):
            (self._breaks if isinstance(node, ast.Break) else self._continues).append(stored)
        elif not isinstance(node, ast.Pass):
            self._simple(node, stored)
        return stored

    def _loop(self, node: Any, stored: set[str], before: set[str], *, runs_once: bool) -> set[str]:
        around = self._breaks, self._continues
        self._breaks, self._continues = [], []
        end = self.block(node.body, stored).intersection(*self._continues)
        breaks = self._breaks
        self._breaks, self._continues = around
        # If each turn is left by ``break``, its ``else`` is only reached if there is nothing to iterate over.
        return self.block(node.orelse, end if runs_once else before).intersection(*breaks)

    def _expression(self, node: ast.expr | None, stored: set[str]) -> None:
        if node is not None:
            self._simple(ast.Expr(node), stored)

    def _store(self, target: ast.expr | None, stored: set[str]) -> None:
        if target is not None:
            self._simple(ast.Assign(targets=[target], value=ast.Constant(None)), stored)

    def _simple(self, node: ast.stmt, stored: set[str]) -> None:
        """Read what a statement without blocks reads, by the code that it compiles to, and add what it stores."""
        module = ast.fix_missing_locations(ast.Module([node], []))
        code = compile(module, "<names>", "exec", flags=self._flags, dont_inherit=True)
        reads, stores = _own_names(code)
        inner = set[str]().union(*map(names_in, _inner_codes(code)))
        # A function may be called from here on, so it reads now what it reads when it is called, but itself.
        self.free |= (reads | (inner - stores if isinstance(node, _DEFINITIONS) else inner)) - stored
        stored |= stores
        if getattr(node, "value", None) is not None:  # an assignment stores its targets also after a branch
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                names = (part for part in ast.walk(target or ast.Pass()) if isinstance(part, ast.Name))
                stored |= {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _words_in_magics(tree: ast.Module) -> set[str]:
    """Return the words in the arguments of magics: ``%timeit f(x)`` and ``!ls {folder}`` have become strings."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        shell = getattr(node.func, "value", None)
        if isinstance(shell, ast.Call) and isinstance(shell.func, ast.Name) and shell.func.id == "get_ipython":
            texts = [part.value for part in node.args if isinstance(part, ast.Constant)]
            found.update(word for text in texts for word in _WORD.findall(str(text)))
    return found
