"""Generated cells are run, once for each way through them; what they read from the notebook must have been found."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from nb_accelerate.notebook.pool.source import read_cell

NAMES = "abcde"
FUNCTIONS = "fgh"
MOST_WAYS = 60
MOST_DECISIONS = 30


class OutOfDecisions(BaseException):
    """The way has become too long."""


class Decisions:
    """Answers the questions of one run. `advance` gives the next way through the cell, in the order of counting."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []
        self.asked = 0
        self.turns = 0

    def tick(self) -> None:
        self.turns += 1
        if self.turns > MOST_DECISIONS:
            raise OutOfDecisions

    def ask(self, choices: int) -> int:
        if self.asked >= MOST_DECISIONS:
            raise OutOfDecisions
        if self.asked == len(self.taken):
            self.taken.append((0, choices))
        self.asked += 1
        return self.taken[self.asked - 1][0]

    def advance(self) -> bool:
        self.asked = self.turns = 0
        while self.taken:
            choice, choices = self.taken.pop()
            if choice + 1 < choices:
                self.taken.append((choice + 1, choices))
                return True
        return False


class Notebook(dict[str, Any]):
    """A namespace that has every name, and remembers for which ones it was asked before a cell bound them.

    A name that the cell deletes is gone, whoever bound it. Here it reads as something, so that the cell goes on.
    """

    def __init__(self, decisions: Decisions) -> None:
        self.read: set[str] = set()
        self.gone: set[str] = set()
        super().__init__(
            __name__="cell",
            tick=decisions.tick,
            flag=lambda: bool(decisions.ask(2)),
            some=lambda *_: range(1 + decisions.ask(2)),
            pick=lambda *_: [1, [1, 2], {"k": 3}][decisions.ask(3)],
            may_fail=lambda *_: self._fail() if decisions.ask(2) else 1,
            call=lambda it: it() if callable(it) else it,
            held=contextlib.nullcontext,
            Failure=ValueError,
        )

    def __missing__(self, name: str) -> int:
        if name not in NAMES + FUNCTIONS:
            raise KeyError(name)
        if name not in self.gone:
            self.read.add(name)
        return 1

    def __delitem__(self, name: str) -> None:
        if name in self:
            super().__delitem__(name)
        elif name not in self.gone:
            self.read.add(name)
        self.gone.add(name)

    def _fail(self) -> None:
        raise ValueError


class Writer:
    """Writes a random cell."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.left = 14
        self.deletes = self.random.random() < 0.5
        """Has ``del`` and ``except ... as``, and no ``:=`` in comprehensions: with both, names go past `Notebook`."""

    def cell(self) -> str:
        return "\n".join(self.block(0, in_loop=False))

    def block(self, depth: int, *, in_loop: bool) -> list[str]:
        lines: list[str] = []
        for _ in range(self.random.randint(1, 4 if depth else 6)):
            self.left -= 1
            lines += self.statement(depth, in_loop=in_loop)
        return lines

    def statement(self, depth: int, *, in_loop: bool) -> list[str]:
        simple = [self.assign, self.assign, self.read, self.delete, self.augment, self.define, self.make_class]
        compound = [self.branch, self.loop, self.endless, self.attempt, self.choose, self.hold]
        if in_loop and self.random.random() < 0.15:
            return [f"if flag(): {self.random.choice(('break', 'continue'))}"]
        if self.left <= 0 or depth >= 3 or self.random.random() < 0.5:
            return self.random.choice(simple)()
        return self.random.choice(compound)(depth, in_loop=in_loop)

    def inside(self, head: str, depth: int, *, in_loop: bool) -> list[str]:
        return [head, *("    " + line for line in self.block(depth + 1, in_loop=in_loop))]

    def name(self) -> str:
        return self.random.choice(NAMES)

    # Expressions, each an integer or nearly.

    def value(self, depth: int = 0) -> str:
        name, other, more = self.name(), self.name(), self.name()
        if depth > 1:
            return name
        inner = self.value(depth + 1)
        return self.random.choice(
            [
                name,
                f"len(({name}, {inner}))",
                f"({name} if flag() else {inner})",
                f"(flag() and ({other} := {inner}))",
                f"len((({other} := {inner}), {other}))",
                f"len([({other}, {more}) for {name} in some({more}) if flag()])",
                "0" if self.deletes else f"len([({name} := {other}) for _ in some({more})])",
                f"len({{1: {name}, 2: ({other} := {inner}), id({other}): {more}}})",
                f"(lambda {name}={inner}: len(({name}, {other})))()",
                f"len(f'{{{name}}} {{{other}!r}}')",
            ]
        )

    # Statements.

    def assign(self) -> list[str]:
        return [f"{self.name()} = {self.value()}"]

    def read(self) -> list[str]:
        return [self.value()]

    def delete(self) -> list[str]:
        return [f"del {self.name()}"] if self.deletes else self.read()

    def augment(self) -> list[str]:
        name = self.name()
        return [f"{name} = 1", f"{name} += len(({self.value()},))"]

    def define(self) -> list[str]:
        name, default = self.random.choice(FUNCTIONS), self.value()
        lines = [f"def {name}({self.name()}={default}):", f"    return {self.value()}"]
        return [*lines, f"call({self.random.choice(FUNCTIONS)})"]

    def make_class(self) -> list[str]:
        lines = [f"class {self.random.choice(FUNCTIONS)}:", f"    {self.name()} = {self.value()}"]
        if self.random.random() < 0.5:
            lines += [f"    if flag(): {self.name()} = {self.name()}", f"    {self.name()} = {self.name()}"]
        return [*lines, f"    def __init__(self): {self.value()}", f"call({self.random.choice(FUNCTIONS)})"]

    def branch(self, depth: int, *, in_loop: bool) -> list[str]:
        test = self.random.choice(
            [
                "flag()",
                f"flag() and ({self.name()} := {self.name()})",
                f"not (flag() or ({self.name()} := {self.name()}))",
                f"0 < ({self.name()} := 1) < call(({self.name()} := 3))",
            ]
        )
        lines = self.inside(f"if {test}:", depth, in_loop=in_loop)
        if self.random.random() < 0.6:
            lines += self.inside("else:", depth, in_loop=in_loop)
        return lines

    def loop(self, depth: int, *, in_loop: bool) -> list[str]:
        lines = self.inside(f"for {self.name()} in some({self.value()}):", depth, in_loop=True)
        if self.random.random() < 0.3:
            lines += self.inside("else:", depth, in_loop=in_loop)
        return lines

    def endless(self, depth: int, *, in_loop: bool) -> list[str]:
        head, *body = self.inside(self.random.choice(["while flag():", "while True:"]), depth, in_loop=True)
        return [head, "    tick()", *body, "    if flag(): break"]

    def attempt(self, depth: int, *, in_loop: bool) -> list[str]:
        lines = [*self.inside("try:", depth, in_loop=in_loop), "    may_fail()"]
        name = f" as {self.name()}" if self.deletes else ""
        lines += self.inside(f"except Failure{name}:", depth, in_loop=in_loop)
        for head in ("else:", "finally:"):
            if self.random.random() < 0.3:
                lines += self.inside(head, depth, in_loop=in_loop and head == "else:")
        return lines

    def choose(self, depth: int, *, in_loop: bool) -> list[str]:
        one, two = self.random.sample(NAMES, 2)
        cases = [f"case [{one}, *{two}]:", f"case {{'k': {one}, **{two}}}:", f"case int({one}) if flag():"]
        last = self.random.choice(["case _:", f"case {one}:", f"case {one} if flag():"])
        lines = [f"match pick({self.value()}):"]
        for case in [*self.random.sample(cases, 2), last]:
            lines += ["    " + line for line in self.inside(case, depth + 1, in_loop=in_loop)]
        return lines

    def hold(self, depth: int, *, in_loop: bool) -> list[str]:
        return self.inside(f"with held({self.value()}) as {self.name()}:", depth, in_loop=in_loop)


def run_every_way(code: str) -> set[str]:
    """Names that a cell reads from the notebook, on the ways through it that are tried."""
    decisions, read = Decisions(), set()
    compiled = compile(code, "<cell>", "exec")
    for _ in range(MOST_WAYS):
        notebook = Notebook(decisions)
        try:
            exec(compiled, notebook)
        except NameError as error:  # the body of a class looks past `__missing__`
            if str(error) == f"name '{error.name}' is not defined":  # and is not a variable of a function's own
                read |= {error.name} - notebook.gone
        except (ValueError, TypeError, OutOfDecisions):
            pass
        read |= notebook.read
        if not decisions.advance():
            break
    return read


def check(seeds: range) -> None:
    for seed in seeds:
        code = Writer(seed).cell()
        try:
            compile(code, "<cell>", "exec")
        except SyntaxError:  # a name bound twice in a pattern, or both by ``for`` and ``:=``
            continue
        missed = run_every_way(code) - read_cell(code).free
        if missed:
            pytest.fail(f"seed {seed}: reads {missed}, which was not found in\n{code}")


class TestGeneratedCells:
    def test_what_cells_read_from_a_notebook_is_found(self):
        check(range(150))

    @pytest.mark.slow
    def test_what_many_cells_read_from_a_notebook_is_found(self):
        check(range(1000, 2000))
