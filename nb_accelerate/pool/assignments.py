"""Which names statements read before they have bound them for certain. Pure.

Statements are followed with the names that are bound for certain at each place: after an ``if``, those that both of
its branches bind; after a loop with ``break``, those that every way out of it has bound. What a function reads is
asked of the compiler, which knows best what a name means in it. Nothing is run.

Two things are assumed, because nearly all code means them: the body of a ``for`` runs at least once, and a ``with``
does not swallow an exception.
"""

from __future__ import annotations
import __future__

import ast
import dis
import inspect
import sys
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_READS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
_BINDS = {"STORE_NAME", "STORE_GLOBAL"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}

_TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))
_TYPE_ALIAS = getattr(ast, "TypeAlias", ())
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BINDING_EXPRESSIONS = (ast.NamedExpr, ast.Lambda, *_COMPREHENSIONS)


def names_in(code: types.CodeType) -> set[str]:
    """Global names that a function reads, also in functions inside it."""
    reads = _outer_reads(code)
    return reads.union(*(names_in(inner) for inner in _inner_codes(code)))


def _outer_reads(code: types.CodeType) -> set[str]:
    """Names that a code object itself reads from its globals, and has not bound before its first branch."""
    reads: set[str] = set()
    binds: set[str] = set()
    is_straight = not getattr(code, "co_exceptiontable", b"")
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS and instruction.argval not in binds:
            reads.add(instruction.argval)
        elif instruction.opname in _BINDS and is_straight:
            binds.add(instruction.argval)
        elif instruction.opcode in _JUMPS:
            is_straight = False
    return reads


def _inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


@dataclass
class _Loop:
    """The names that are bound at each ``break`` and ``continue`` of a loop."""

    breaks: list[set[str]] = field(default_factory=list)
    continues: list[set[str]] = field(default_factory=list)


class Reader:
    """Follows statements; the names that are bound for certain go in and come out, or None where nothing goes on.

    Args:
        flags: for the compiler.

    Attributes:
        free: names that were read and not bound.
    """

    def __init__(self, flags: int) -> None:
        self.free: set[str] = set()
        self._flags = flags
        self._later: set[str] = set()
        """Read by functions that the statement makes and leaves for later, when it has bound its names."""
        self._is_called = False
        """Inside a call or a comprehension, which may call a function that is made there, ``map(lambda ...)`` say."""
        self._loops: list[_Loop] = []
        self._around_class: set[str] | None = None
        """In the body of a class, the names bound outside of it: all that functions and comprehensions in it see."""
        self._targets: set[str] = set()
        """Variables of the comprehensions around an expression."""

    def block(self, statements: Sequence[ast.stmt], bound: set[str] | None) -> set[str] | None:
        """Follow statements; neither changes nor keeps `bound`."""
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
            return _meet(self.block(node.body, yes), self.block(node.orelse, no))
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
        """A statement after which the next one follows."""
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
        _, loop = self._turn(node.body, yes)
        is_endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        return _meet(None if is_endless else self.block(node.orelse, no), *loop.breaks)

    def _for(self, node: ast.For | ast.AsyncFor, bound: set[str]) -> set[str] | None:
        self._expression(node.iter, bound)
        self._call_functions(bound)
        begin = set(bound)
        self._bind(node.target, begin)
        end, loop = self._turn(node.body, begin)
        ended = _meet(end, *loop.continues)
        # Where every turn leaves it early, it only ends by itself if there is nothing to iterate over.
        return _meet(self.block(node.orelse, bound if ended is None else ended), *loop.breaks)

    def _turn(self, body: Sequence[ast.stmt], bound: set[str]) -> tuple[set[str] | None, _Loop]:
        """Follow the body of a loop once; gives what is bound at its end, and where it is left."""
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
        # An end that is not reached, but for an exception that is swallowed: then nothing is certain.
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
            end = _meet(end, self.block(handler.body, failed))
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
        return _meet(*ends) if last.guard is None and _takes_all(last.pattern) else _meet(*ends, bound)

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
        """What a definition reads at once, and what code inside it reads when it is called."""
        code = compile(tree, "<names>", "exec", flags=self._flags, dont_inherit=True)
        for name in _outer_reads(code):
            self._read(name, bound)
        self._later.update(*map(names_in, _inner_codes(code)))

    def _read_later(self, tree: ast.Module | ast.Expression) -> None:
        """What functions in it read when they are called, wherever in it they are made."""
        mode = "eval" if isinstance(tree, ast.Expression) else "exec"
        code = compile(tree, "<names>", mode, flags=self._flags, dont_inherit=True)
        waiting = list(_inner_codes(code))
        while waiting:
            one = waiting.pop()
            waiting += _inner_codes(one)
            if one.co_flags & inspect.CO_OPTIMIZED:  # not the body of a class, which was followed
                self._later |= _outer_reads(one) - self._targets

    def _call_functions(self, bound: set[str]) -> None:
        """A statement has ended: from here on, the functions it made may be called."""
        if self._around_class is None:
            self.free |= self._later - bound
            self._later.clear()

    # Expressions, in the order in which they are evaluated. What is bound for certain is added to `bound`.

    def _expressions(self, nodes: Iterable[ast.AST], bound: set[str]) -> None:
        for node in nodes:
            self._expression(node, bound)

    def _expression(self, node: ast.AST, bound: set[str]) -> None:
        parts = list(ast.walk(node))
        if not any(isinstance(part, _BINDING_EXPRESSIONS) for part in parts):
            # Then the order does not matter, and what is very deep, a long sum say, can be read without recursion.
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
        """What is bound where it is true, and where it is false."""
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
        """Assign to names, and evaluate what others of the targets are parts of, as in ``a[i], b = ...``."""
        self._expression(target, bound)
        bound |= _stored(target)

    def _delete(self, target: ast.expr, bound: set[str]) -> None:
        if isinstance(target, ast.Name):
            self._read(target.id, bound)
            if self._around_class is None or target.id in self._around_class:
                bound.add(target.id)  # what the notebook has under that name is not seen any more
            else:
                bound.discard(target.id)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self._delete(part, bound)
        else:
            self._expression(target, bound)


def _meet(*states: set[str] | None) -> set[str] | None:
    """What is bound whichever way one came; None if there is no way."""
    known = [state for state in states if state is not None]
    return set.intersection(*known) if known else None


def _stored(target: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def _captured(pattern: ast.pattern) -> set[str]:
    """Names that a pattern binds when it fits."""
    found: set[str | None] = set()
    for part in ast.walk(pattern):
        if isinstance(part, (ast.MatchAs, ast.MatchStar)):
            found.add(part.name)
        elif isinstance(part, ast.MatchMapping):
            found.add(part.rest)
    return {name for name in found if name is not None}


def _takes_all(pattern: ast.pattern) -> bool:
    """Does it fit whatever comes?"""
    if isinstance(pattern, ast.MatchOr):
        return _takes_all(pattern.patterns[-1])
    return isinstance(pattern, ast.MatchAs) and (pattern.pattern is None or _takes_all(pattern.pattern))
