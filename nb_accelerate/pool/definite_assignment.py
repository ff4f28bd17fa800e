"""Find the names that statements read before they are definitely assigned. Pure: nothing is run.

A name is definitely assigned ("bound") at a place if every way to that place binds it: after an ``if``, those names
that both of its branches bind; after a loop, those that every way out of it binds. Which global names a function reads
is read from its compiled code.

Two things are assumed, because nearly all code means them: the body of a ``for`` runs at least once, and a ``with``
swallows no exception.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nb_accelerate.pool.code_names import inner_codes, names_in, own_reads

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))
_TYPE_ALIAS = getattr(ast, "TypeAlias", ())
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BINDING_EXPRESSIONS = (ast.NamedExpr, ast.Lambda, *_COMPREHENSIONS)


@dataclass
class _Loop:
    """The names that are bound at each ``break`` and ``continue`` of a loop."""

    breaks: list[set[str]] = field(default_factory=list)
    continues: list[set[str]] = field(default_factory=list)


class DefiniteAssignment:
    """Follows statements, and collects the names that they read before these are bound.

    Methods take the set of names that are bound before a node of the syntax tree. Those for statements return the set
    of names that are bound after it, or None if the next statement is never reached. Those for expressions add to the
    set they are given.

    Args:
        flags: of the compiler, for `compile`.

    Attributes:
        free: names that were read before they were bound.
    """

    def __init__(self, flags: int) -> None:
        self.free: set[str] = set()
        self._flags = flags
        self._later: set[str] = set()
        """Names that functions read which the current statement defines. They may be called once it has ended."""
        self._is_called = False
        """Whether this is inside a call or comprehension, which may call a lambda at once: ``map(lambda ...)``."""
        self._loops: list[_Loop] = []
        self._around_class: set[str] | None = None
        """In the body of a class, names that are bound outside of it: functions in the class see no others."""
        self._targets: set[str] = set()
        """Variables of the comprehensions around the current expression."""

    def block(self, statements: Sequence[ast.stmt], bound: set[str] | None) -> set[str] | None:
        """Follow statements one after the other. `bound` is not changed."""
        bound = None if bound is None else set(bound)
        for statement in statements:
            if bound is None:
                return None
            bound = self._statement(statement, bound)
            if bound is not None:
                self._call_functions(bound)
        return bound

    def _statement(self, node: ast.stmt, bound: set[str]) -> set[str] | None:
        if isinstance(node, ast.If):
            yes, no = self._condition(node.test, bound)
            self._call_functions(bound)
            return _intersection(self.block(node.body, yes), self.block(node.orelse, no))
        if isinstance(node, ast.While):
            return self._while(node, bound)
        if isinstance(node, (ast.For, ast.AsyncFor)):
            return self._for(node, bound)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return self._with(node, bound)
        if isinstance(node, _TRY):
            return self._try(node, bound)
        if isinstance(node, ast.Match):
            return self._match(node, bound)
        if isinstance(node, (ast.Break, ast.Continue)):
            loop = self._loops[-1]
            (loop.breaks if isinstance(node, ast.Break) else loop.continues).append(bound)
            return None
        if isinstance(node, (ast.Raise, ast.Return)):
            self._expressions(ast.iter_child_nodes(node), bound)
            self._call_functions(bound)
            return None
        return self._simple(node, bound)

    def _simple(self, node: ast.stmt, bound: set[str]) -> set[str]:
        """Follow a statement without other statements in it that does not leave the block."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._function(node, bound)
            bound.add(node.name)
        elif isinstance(node, ast.ClassDef):
            self._class(node, bound)
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update((alias.asname or alias.name.split(".")[0]) for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Assign):
            self._expression(node.value, bound)
            for target in node.targets:
                self._bind(target, bound)
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.target, ast.Name):
                self._read(node.target.id, bound)
            self._expression(node.value, bound)
            self._bind(node.target, bound)
        elif isinstance(node, ast.AnnAssign):
            self._annotated(node, bound)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self._delete(target, bound)
        elif isinstance(node, ast.Assert):
            bound, no = self._condition(node.test, bound)
            if node.msg is not None:
                self._expression(node.msg, no)
        elif isinstance(node, _TYPE_ALIAS):
            self._ask_compiler(ast.Module([node], []), bound)
            bound.add(node.name.id)
        else:
            self._expressions(ast.iter_child_nodes(node), bound)
        return bound

    # Statements with other statements in them.

    def _while(self, node: ast.While, bound: set[str]) -> set[str] | None:
        yes, no = self._condition(node.test, bound)
        self._call_functions(bound)
        _, loop = self._iteration(node.body, yes)
        is_endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        return _intersection(None if is_endless else self.block(node.orelse, no), *loop.breaks)

    def _for(self, node: ast.For | ast.AsyncFor, bound: set[str]) -> set[str] | None:
        self._expression(node.iter, bound)
        self._call_functions(bound)
        begin = set(bound)
        self._bind(node.target, begin)
        end, loop = self._iteration(node.body, begin)
        ended = _intersection(end, *loop.continues)
        # If every iteration leaves it by ``break``, its ``else`` is only reached if there is nothing to iterate over.
        return _intersection(self.block(node.orelse, bound if ended is None else ended), *loop.breaks)

    def _iteration(self, body: Sequence[ast.stmt], bound: set[str]) -> tuple[set[str] | None, _Loop]:
        """Follow the body of a loop once. Returns what is bound at its end, and at each ``break`` and ``continue``."""
        loop = _Loop()
        self._loops.append(loop)
        end = self.block(body, bound)
        self._loops.pop()
        return end, loop

    def _with(self, node: ast.With | ast.AsyncWith, bound: set[str]) -> set[str]:
        for item in node.items:
            self._expression(item.context_expr, bound)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, bound)
        self._call_functions(bound)
        end = self.block(node.body, bound)
        # If its end is never reached, code goes on only if an exception is swallowed: then it has bound nothing.
        return bound if end is None else end

    def _try(self, node: ast.Try, bound: set[str]) -> set[str] | None:
        end = self.block(node.orelse, self.block(node.body, bound))
        for handler in node.handlers:
            failed = set(bound)
            if handler.type is not None:
                self._expression(handler.type, failed)
                self._call_functions(failed)
            if handler.name is not None:
                failed.add(handler.name)
            end = _intersection(end, self.block(handler.body, failed))
        self.block(node.finalbody, bound)  # also after an exception that nobody catches here
        return self.block(node.finalbody, end)

    def _match(self, node: ast.Match, bound: set[str]) -> set[str] | None:
        self._expression(node.subject, bound)
        self._call_functions(bound)
        ends: list[set[str] | None] = []
        for case in node.cases:
            inside = set(bound)
            for part in ast.walk(case.pattern):
                if isinstance(part, ast.MatchValue):
                    self._expression(part.value, inside)
                elif isinstance(part, ast.MatchClass):
                    self._expression(part.cls, inside)
                elif isinstance(part, ast.MatchMapping):
                    self._expressions(part.keys, inside)
            inside |= _captured(case.pattern)
            if case.guard is not None:
                inside, _ = self._condition(case.guard, inside)
                self._call_functions(inside)
            ends.append(self.block(case.body, inside))
        last = node.cases[-1]
        return _intersection(*ends) if last.guard is None and _takes_all(last.pattern) else _intersection(*ends, bound)

    # Definitions.

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, bound: set[str]) -> None:
        self._expressions(node.decorator_list, bound)
        # Defaults and annotations: whether and when these are evaluated depends on Python's version.
        signature = ast.FunctionDef(**{**dict(ast.iter_fields(node)), "body": [ast.Pass()], "decorator_list": []})
        self._ask_compiler(ast.fix_missing_locations(ast.Module([ast.copy_location(signature, node)], [])), bound)
        if self._around_class is None:
            self._read_later(ast.Module([node], []))

    def _class(self, node: ast.ClassDef, bound: set[str]) -> None:
        inside = bound | {parameter.name for parameter in getattr(node, "type_params", ())}
        self._expressions(node.decorator_list, bound)
        self._expressions((*node.bases, *node.keywords), inside)
        if self._around_class is not None:
            self.block(node.body, self._around_class)
            return
        self._around_class = set(inside)
        loops, self._loops = self._loops, []
        self.block(node.body, inside)
        self._around_class, self._loops = None, loops
        self._read_later(ast.Module([node], []))

    def _annotated(self, node: ast.AnnAssign, bound: set[str]) -> None:
        if node.value is not None:
            self._expression(node.value, bound)
            self._bind(node.target, bound)
        elif not isinstance(node.target, ast.Name):
            self._bind(node.target, bound)
        if self._flags & __future__.annotations.compiler_flag:
            return
        if sys.version_info >= (3, 14):
            self._later |= {part.id for part in ast.walk(node.annotation) if isinstance(part, ast.Name)}
        else:
            self._expression(node.annotation, bound)

    def _ask_compiler(self, tree: ast.Module, bound: set[str]) -> None:
        """Note the names that a definition reads at once, and those that code inside it reads when it is called."""
        code = compile(tree, "<names>", "exec", flags=self._flags, dont_inherit=True)
        for name in own_reads(code):
            self._read(name, bound)
        self._later.update(*map(names_in, inner_codes(code)))

    def _read_later(self, tree: ast.Module | ast.Expression) -> None:
        """Note the names that functions in a tree read when they are called, however deep they are defined."""
        mode = "eval" if isinstance(tree, ast.Expression) else "exec"
        code = compile(tree, "<names>", mode, flags=self._flags, dont_inherit=True)
        waiting = list(inner_codes(code))
        while waiting:
            one = waiting.pop()
            waiting += inner_codes(one)
            if one.co_flags & inspect.CO_OPTIMIZED:  # not the body of a class, which was followed
                self._later |= own_reads(one) - self._targets

    def _call_functions(self, bound: set[str]) -> None:
        """Count the names that functions of the statement read as read now: they may be called from here on."""
        if self._around_class is None:
            self.free |= self._later - bound
            self._later.clear()

    # Expressions, in the order in which they are evaluated.

    def _expressions(self, nodes: Iterable[ast.AST], bound: set[str]) -> None:
        for node in nodes:
            self._expression(node, bound)

    def _expression(self, node: ast.AST, bound: set[str]) -> None:
        parts = list(ast.walk(node))
        if not any(isinstance(part, _BINDING_EXPRESSIONS) for part in parts):
            # The order does not matter then, and a deep tree, such as that of a long sum, needs no recursion.
            for part in parts:
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                    self._read(part.id, bound)
        elif isinstance(node, ast.NamedExpr):
            self._expression(node.value, bound)
            bound.add(node.target.id)
        elif isinstance(node, ast.Lambda):
            self._expressions((*node.args.defaults, *filter(None, node.args.kw_defaults)), bound)
            if self._around_class is None:
                self._read_later(ast.Expression(node))
            if self._is_called:
                self._call_functions(bound)
        elif isinstance(node, (ast.Call, *_COMPREHENSIONS)):
            before, self._is_called = self._is_called, True
            if isinstance(node, ast.Call):
                self._expressions(ast.iter_child_nodes(node), bound)
            else:
                self._comprehension(node, bound)
            self._is_called = before
        elif isinstance(node, (ast.BoolOp, ast.IfExp)):
            yes, no = self._condition(node, bound)
            bound |= yes & no
        elif isinstance(node, ast.Compare):
            self._expressions((node.left, node.comparators[0]), bound)
            self._expressions(node.comparators[1:], set(bound))
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                self._expressions((value,) if key is None else (key, value), bound)
        else:
            self._expressions(ast.iter_child_nodes(node), bound)

    def _condition(self, node: ast.expr, bound: set[str]) -> tuple[set[str], set[str]]:
        """Follow a condition. Returns what is bound if it is true, and what is bound if it is false."""
        if isinstance(node, ast.BoolOp):
            is_and = isinstance(node.op, ast.And)
            goes_on, leaves = set(bound), None
            for value in node.values:
                yes, no = self._condition(value, goes_on)
                goes_on, left = (yes, no) if is_and else (no, yes)
                leaves = left if leaves is None else leaves & left
            assert leaves is not None
            return (goes_on, leaves) if is_and else (leaves, goes_on)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yes, no = self._condition(node.operand, bound)
            return no, yes
        if isinstance(node, ast.IfExp):
            yes, no = self._condition(node.test, bound)
            (true_a, false_a), (true_b, false_b) = self._condition(node.body, yes), self._condition(node.orelse, no)
            return true_a & true_b, false_a & false_b
        bound = set(bound)
        self._expression(node, bound)
        return set(bound), bound

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, bound: set[str]
    ) -> None:
        first, *others = node.generators
        self._expression(first.iter, bound)
        inside = set(bound if self._around_class is None or self._targets else self._around_class)
        before = self._targets
        for generator in (first, *others):
            if generator is not first:
                self._expression(generator.iter, inside)
            self._targets = self._targets | _stored(generator.target)
            self._bind(generator.target, inside)
            for test in generator.ifs:
                inside, _ = self._condition(test, inside)
        self._expressions((node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,), inside)
        self._targets = before

    def _read(self, name: str, bound: set[str]) -> None:
        if name not in bound:
            self.free.add(name)

    def _bind(self, target: ast.expr, bound: set[str]) -> None:
        """Bind the names of an assignment target, and follow its other expressions, as in ``a[i], b = ...``."""
        self._expression(target, bound)
        bound |= _stored(target)

    def _delete(self, target: ast.expr, bound: set[str]) -> None:
        if isinstance(target, ast.Name):
            self._read(target.id, bound)
            if self._around_class is None or target.id in self._around_class:
                bound.add(target.id)  # code after it fails, whatever the notebook has under that name
            else:
                bound.discard(target.id)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self._delete(part, bound)
        else:
            self._expression(target, bound)


def _intersection(*states: set[str] | None) -> set[str] | None:
    """Return the names that are bound in all states, those of unreachable places (None) aside; None if all are."""
    known = [state for state in states if state is not None]
    return set.intersection(*known) if known else None


def _stored(target: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def _captured(pattern: ast.pattern) -> set[str]:
    """Return the names that a pattern binds if it matches."""
    found: set[str | None] = set()
    for part in ast.walk(pattern):
        if isinstance(part, (ast.MatchAs, ast.MatchStar)):
            found.add(part.name)
        elif isinstance(part, ast.MatchMapping):
            found.add(part.rest)
    return {name for name in found if name is not None}


def _takes_all(pattern: ast.pattern) -> bool:
    """Return whether a pattern matches everything."""
    if isinstance(pattern, ast.MatchOr):
        return _takes_all(pattern.patterns[-1])
    return isinstance(pattern, ast.MatchAs) and (pattern.pattern is None or _takes_all(pattern.pattern))
