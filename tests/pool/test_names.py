"""What a cell reads: against the standard library, and against what running generated cells really reads."""

from __future__ import annotations

import ast
import os
import random
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nb_accelerate.notebook.pool.names import names_in, names_of
from nb_accelerate.notebook.pool.source import read_cell

if TYPE_CHECKING:
    from collections.abc import Iterator


def free(code: str) -> set[str]:
    return set(read_cell(code).free)


class TestStatements:
    @pytest.mark.parametrize(
        ("code", "names"),
        [
            ("y = x + 1", {"x"}),
            ("x = 1\ny = x", set()),
            ("x = x + 1", {"x"}),
            ("x += 1", {"x"}),
            ("if flag:\n    x = 1\nprint(x)", {"flag", "print", "x"}),
            ("for i in data:\n    i.go()", {"data"}),
            ("with open_it() as f:\n    f.read()", {"open_it"}),
            ("try:\n    a()\nexcept E as e:\n    b(e)", {"a", "E", "b"}),
            ("def f(a, b=default):\n    return a + b + scale", {"default", "scale"}),
            ("def f():\n    def g():\n        return deep\n    return g", {"deep"}),
            ("def f():\n    return f()\nf()", set()),
            ("class A(Base):\n    size = n\n    def go(self): return helper(self)", {"Base", "n", "helper"}),
            ("[x * k for x in xs]", {"k", "xs"}),
            ("import torch\ntorch.ones(2)", set()),
            ("await fetch(url)", {"fetch", "url"}),
            ("f'{value:{width}}'", {"value", "width"}),
            ("lambda q: q + w", {"w"}),
            ("get_ipython().run_line_magic('timeit', 'step(batch)')", {"get_ipython", "timeit", "step", "batch"}),
            ("for i in data:\n    if i: break\n    i.go()", {"data"}),
            ("for i in data:\n    if i: continue\n    last = i\nlast.go()", {"data", "last"}),
            ("for i in data:\n    last = i\nlast.go()", {"data"}),
            ("for i in data:\n    if i:\n        found = i\n        break\nelse:\n    found = 0\nfound", {"data"}),
            ("while True:\n    x = step()\n    if x: break\nx", {"step"}),
            ("while ok():\n    x = 1\nx", {"ok", "x"}),
            ("for i in data:\n    x.go()\n    del x", {"data", "x"}),
            ("x = 1\nfor i in data:\n    x.go()\n    del x", {"data"}),
            ("if flag:\n    x = 1\nelse:\n    x = 2\nx", {"flag"}),
            ("if flag:\n    raise Stop\nelse:\n    x = 2\nx", {"flag", "Stop", "x"}),
            ("try:\n    import fast as m\nexcept ImportError:\n    m = None\nm", {"ImportError"}),
            ("try:\n    x = f()\nexcept E:\n    pass\nx", {"f", "E", "x"}),
            ("try:\n    f()\nexcept E as e:\n    pass\ne", {"f", "E", "e"}),
            ("for i in data:\n    try:\n        f()\n    except E as e:\n        break\ne", {"data", "f", "E", "e"}),
            ("try:\n    x = f()\nfinally:\n    x.close()", {"f", "x"}),
            ("try:\n    f()\nexcept* E as e:\n    x = e\nelse:\n    x = 1\nx", {"f", "E"}),
            ("match command:\n    case [x, *rest]: rest\n    case {'k': x, **more}: more\nx", {"command", "x"}),
            ("match command:\n    case Point(x=x) if x > low: pass\n    case x: x\n", {"command", "Point", "low"}),
            ("match command:\n    case color.RED: y = 1\n    case _: y = 2\ny", {"command", "color", "y"}),
            ("if flag and (x := f()):\n    x\nx", {"flag", "f", "x"}),
            ("if not (x := f()) or x > y:\n    x", {"f", "y"}),
            ("z = (x := 1) if flag else 0\nx", {"flag", "x"}),
            ("a < (b := f()) < (c := g())\nb, c", {"a", "f", "g", "c"}),
            ("[(x := i) for i in data]\nx", {"data", "x"}),
            ("[i + k for i in data for k in i.parts if k in keep]", {"data", "keep"}),
            ("{k: (v, w) for k, v in data}", {"data", "w"}),
            ("i = 1\n[i for i in i]", set()),
            ("x: Kind = 1\ny: Other\ny", {"Kind", "Other", "y"}),
            ("from __future__ import annotations\nx: Kind = 1\ndef f(a: Kind) -> Kind: ...", set()),
            ("def f(a: Kind = default) -> Kind: return a, late", {"Kind", "default", "late"}),
            ("x = [lambda q=first: (q, x, other)]", {"first", "x", "other"}),
            ("class A:\n    def f(self): return A, super().f()", {"super"}),
            ("class A:\n    b = 1\n    c = [b for _ in b]\n    def f(self): return b", {"b"}),
            ("class A:\n    n = 1\n    class B:\n        m = n", {"n"}),
            ("class A:\n    if flag: n = 1\n    n", {"flag", "n"}),
            ("x = 1\nclass A:\n    x\n    x = 2\nx", set()),
            ("del x\nx", {"x"}),
            ("x = 1\ndel x\nx", set()),
            ("del (a[i], b.c)", {"a", "i", "b"}),
            ("global x\nx = 1\nx", set()),
            ("def f():\n    global n\n    if flag: n = 1\n    return n", {"flag", "n"}),
            ("def f():\n    global n\n    n = 1\n    return n", set()),
            ("from math import *\nsin(x)", {"sin", "x"}),
            ("import os.path, sys as s\nos, s, sys", {"sys"}),
            ("async for x in source: x.go()\nasync with opened() as f: f.read()", {"source", "opened"}),
            ("result = [x async for x in source if await ok(x)]", {"source", "ok"}),
            ("with lock: x = 1\nx", {"lock"}),
            ("while True:\n    x = 1\n    if x: break\nx", set()),
            ("a[i], b.c, *d = value\nd", {"a", "i", "b", "value"}),
            ("x += y\nz[i] += 1", {"x", "y", "z", "i"}),
            ("print(f'{(x := 1)}{x}{y!r:>{w}}')", {"print", "y", "w"}),
            ("{a: (b := 1), b: c}", {"a", "c"}),
            ("assert x, y", {"x", "y"}),
        ],
    )
    def test_names_that_a_cell_reads_before_it_binds_them_for_certain(self, code: str, names: set[str]):
        if sys.version_info < (3, 11) and "except*" in code:
            pytest.skip("except* came with Python 3.11")
        assert free(code) == names

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters came with Python 3.12")
    def test_type_parameters_are_no_names_of_the_notebook(self):
        code = "def f[T: Bound](a: T): ...\nclass A[K](Base[K]):\n    x: K\ntype Pair[U] = tuple[U, Other]\nPair, A"
        assert free(code) - {"tuple"} == {"Bound", "Base", "Other"}

    def test_a_sum_that_is_too_deep_to_follow_is_read_all_the_same(self):
        deep = " + ".join(["x"] * 600)
        assert free(f"y = {deep} + z") == {"x", "z"}
        assert free(f"y = {deep} + (lambda: z)()") >= {"x"}

    def test_a_function_in_which_a_branch_binds_a_global_name_needs_it(self):
        scope: dict[str, Any] = {}
        exec("def f():\n    global n\n    for _ in (): n = 1\n    return n", scope)
        assert names_in(scope["f"].__code__) == {"n"}

    def test_names_that_a_function_reads_are_those_of_functions_inside_it_too(self):
        def outer() -> object:
            return lambda: ast

        assert names_in(outer.__code__) == {"ast"}

    def test_a_syntax_error_has_its_line_in_the_whole_cell(self):
        with pytest.raises(SyntaxError) as caught:
            read_cell("a = 1\ndef :", head="%%distributed")
        assert caught.value.lineno == 3

    def test_blank_lines_at_the_top_of_a_cell_are_counted(self):
        source = read_cell("\n  \nx = 1", head="%%distributed")
        assert (source.above, source.code) == (3, "x = 1")
        with pytest.raises(SyntaxError) as caught:
            read_cell("\n\ndef :", head="%%distributed")
        assert caught.value.lineno == 4


def library() -> list[Path]:
    root = Path(os.__file__).parent
    return sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)


class AsCell(ast.NodeTransformer):
    """Makes a cell of a function's body: what is only legal in a function becomes what comes nearest."""

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        return ast.copy_location(ast.Expr(node.value) if node.value else ast.Pass(), node)

    def visit_Yield(self, node: ast.Yield) -> ast.expr:
        return self.visit(node.value) if node.value else ast.copy_location(ast.Constant(None), node)

    def visit_YieldFrom(self, node: ast.YieldFrom) -> ast.expr:
        return self.visit(node.value)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return node

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef


def parts(tree: ast.Module) -> Iterator[ast.Module]:
    """A module, and the body of each of its functions, as a cell."""
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = [AsCell().visit(statement) for statement in node.body]
            yield ast.Module(body, [])


def compiles(tree: ast.Module) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(tree, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):  # a return or a break, without what it belongs to
        return False
    return True


def check_library(paths: list[Path]) -> int:
    """Read modules and statements; gives how many there were."""
    count = 0
    for path in paths:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # tests of the compiler itself
            continue
        for part in parts(tree):
            if not compiles(part):
                continue
            count += 1
            try:
                found, _ = names_of(part)
            except Exception as error:
                pytest.fail(f"{path}: {type(error).__name__}: {error}\n{ast.unparse(part)[:2000]}")
            if part is tree:
                words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
                unknown = {name for name in found - words if not name.startswith("_")}
                assert not unknown, f"{path}: reads {unknown}, which is not in it"
    return count


SEED = 20


class TestStandardLibrary:
    @pytest.mark.slow
    def test_a_sample_of_its_modules_is_read(self):
        print(f"seed {SEED}")
        sample = random.Random(SEED).sample(library(), 12)
        assert check_library(sample) > 100
