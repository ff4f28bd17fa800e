"""Find the names that a cell reads from the notebook. Pure: nothing is run.

These are the names that it reads before it has bound them, on some way through it. What is not certain counts as read:
a name too many is sent, and nobody notices. Two things are assumed, because nearly all code means them: the body of a
``for`` runs at least once, and a ``with`` swallows no exception.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import re
import warnings
from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.pool.code_names import inner_codes, names_in, own_names

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Sequence

_WORD = re.compile(r"[^\W\d]\w*")
_TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, getattr(ast, "TypeAlias", ast.ClassDef))
_SCOPES = (ast.Lambda, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NOT_EXPRESSIONS = (ast.stmt, ast.excepthandler, ast.match_case, ast.expr_context, ast.operator)


def free_names(tree: ast.Module) -> set[str]:
    """Return the names that a cell may read before it has bound them. Built-in names are among them.

    Args:
        tree: the syntax tree of a cell that compiles.
    """
    reading = _Reading(_flags(tree))
    try:
        with warnings.catch_warnings():  # the cell has been compiled before, with its warnings
            warnings.simplefilter("ignore")
            reading.block(tree.body, set())
        free = reading.free
    except RecursionError:  # it is nested too deeply: then all names in it, rather than too few
        free = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {name for name in free | _in_magics(tree) if not name.startswith("__")}


class _Reading:
    """Follows statements, with the set of names that are bound by then. None is the set of a place never reached.

    Attributes:
        free: names that were read before they were bound.
    """

    def __init__(self, flags: int) -> None:
        self.free: set[str] = set()
        self._flags = flags
        self._leaves: tuple[list[set[str]], list[set[str]]] = ([], [])
        """What is bound at each ``break``, and each ``continue``, of the loop that is followed."""

    def block(self, statements: Sequence[ast.stmt], bound: set[str] | None) -> set[str] | None:
        """Follow statements one after the other; return what is bound at their end. `bound` is not changed."""
        bound = None if bound is None else set(bound)
        for statement in statements:
            if bound is None:
                return None
            bound = self._statement(statement, bound)
        return bound

    def _statement(self, node: ast.stmt, bound: set[str]) -> set[str] | None:
        if isinstance(node, _DEFINITIONS):
            self._definition(node, bound)
            return bound
        self._head(node, bound)
        if isinstance(node, ast.If):
            return _in_all(self.block(node.body, bound), self.block(node.orelse, bound))
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            return self._loop(node, bound)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return self.block(node.body, bound) or bound
        if isinstance(node, _TRY):
            end = self.block(node.orelse, self.block(node.body, bound))
            for handler in node.handlers:
                self._head(handler, bound)
                end = _in_all(end, self.block(handler.body, bound | ({handler.name} if handler.name else set())))
            self.block(node.finalbody, bound)  # also after an exception that nobody catches here
            return self.block(node.finalbody, end)
        if isinstance(node, ast.Match):
            ends = []
            for case in node.cases:
                captured = bound | _captured(case.pattern)
                self._head(case, captured)
                ends.append(self.block(case.body, captured))
            last = node.cases[-1]
            takes_all = last.guard is None and isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
            return _in_all(*ends) if takes_all else _in_all(*ends, bound)
        if isinstance(node, (ast.Break, ast.Continue)):
            self._leaves[isinstance(node, ast.Continue)].append(bound)
            return None
        return None if isinstance(node, (ast.Raise, ast.Return)) else bound

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, bound: set[str]) -> set[str] | None:
        around, self._leaves = self._leaves, ([], [])
        end = self.block(node.body, bound)
        (breaks, continues), self._leaves = self._leaves, around
        if isinstance(node, ast.While):
            is_endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
            end = None if is_endless else bound
        else:
            # If every turn leaves it by ``break``, its ``else`` is only reached if there is nothing to iterate over.
            end = _in_all(end, *continues) or bound
        return _in_all(self.block(node.orelse, end), *breaks)

    def _head(self, node: ast.AST, bound: set[str]) -> None:
        """Read the expressions of a statement, and then bind its targets."""
        parts = [part for part in ast.iter_child_nodes(node) if not isinstance(part, _NOT_EXPRESSIONS)]
        if isinstance(node, ast.AnnAssign):
            has_text = self._flags & __future__.annotations.compiler_flag
            parts = [part for part in (node.target, node.value, None if has_text else node.annotation) if part]
        for part in parts:
            self._expression(part, bound)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {alias.asname or alias.name.split(".")[0] for alias in node.names if alias.name != "*"}
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self._read({node.target.id}, bound)
        elif isinstance(node, ast.Delete):
            self._read(_names(node, ast.Del), bound)
            bound |= _names(node, ast.Del)  # code after it fails, whatever the notebook has under that name
        for part in parts:
            target = part.optional_vars if isinstance(part, ast.withitem) else part
            is_bound = isinstance(getattr(target, "ctx", None), ast.Store) and getattr(node, "value", part) is not None
            if target is not None and is_bound:
                bound |= _names(target, ast.Store)

    def _expression(self, node: ast.AST, bound: set[str]) -> None:
        if not any(isinstance(part, _SCOPES) for part in ast.walk(node)):
            self._read(_names(node, ast.Load), bound)
        elif isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            code = self._compiled(ast.copy_location(ast.Expr(node), node))
            reads, binds = own_names(code)
            self._read(reads.union(*map(names_in, inner_codes(code))), bound)
            bound |= binds
        else:  # a target or a pattern, with such an expression in it
            for part in ast.iter_child_nodes(node):
                self._expression(part, bound)

    def _definition(self, node: ast.stmt, bound: set[str]) -> None:
        """Read what a function or class reads when it is defined, and later: it may be called from here on."""
        code = self._compiled(node)
        reads, _ = own_names(code)
        later: set[str] = set()
        waiting = list(inner_codes(code))
        while waiting:
            inner = waiting.pop()
            if inner.co_flags & inspect.CO_OPTIMIZED:
                later |= names_in(inner)
            else:  # the body of a class, which runs at once
                reads |= own_names(inner)[0]
                waiting += inner_codes(inner)
        self._read(reads, bound)
        name: Any = getattr(node, "name", None)
        bound.add(name if isinstance(name, str) else name.id)
        self._read(later, bound)

    def _compiled(self, node: ast.stmt) -> types.CodeType:
        code: types.CodeType = compile(ast.Module([node], []), "<names>", "exec", flags=self._flags, dont_inherit=True)
        return code

    def _read(self, names: set[str], bound: set[str]) -> None:
        self.free |= names - bound


def _in_all(*states: set[str] | None) -> set[str] | None:
    """Return the names that are bound in all states, those of places never reached aside; None if all are."""
    known = [state for state in states if state is not None]
    return set.intersection(*known) if known else None


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, context)}


def _captured(pattern: ast.pattern) -> set[str]:
    """Return the names that a pattern binds if it matches."""
    found = {getattr(part, "name", None) or getattr(part, "rest", None) for part in ast.walk(pattern)}
    return {name for name in found if name is not None}


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
