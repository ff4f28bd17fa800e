"""What the package changes while it runs, of its own and of others, is what two tables say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from structure.layers import tree_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nb_accelerate"
PAGE = Path(__file__).with_name("what_changes.md").read_text(encoding="utf-8")

OF_THE_PROCESS = {"os.environ", "sys.path", "sys.argv", "sys.modules", "linecache.cache"}
"""What every program changes that runs another one, and what a debugger of Python is told."""

LAST = {f"sys.last_{name}" for name in ("type", "value", "traceback", "exc")}

FIXED = (
    "getattr",
    "importlib.import_module",
    "itemgetter",
    "threading.Lock",
    "default_path()",
    "InRanks",
    "Variable",
)
"""Beginnings of what a variable in lower case is bound to once: functions, modules, locks."""


def _rows(heading: str) -> list[list[str]]:
    table = PAGE[PAGE.index(heading) :].split("\n\n")[1].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def _words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _modules() -> list[tuple[str, ast.Module]]:
    return [(str(path.relative_to(PACKAGE)), tree_of(path)) for path in sorted(PACKAGE.rglob("*.py"))]


def _imported(tree: ast.Module) -> set[str]:
    """Names of a module that other libraries have given it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("nb_accelerate"):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def changed_of_others(tree: ast.Module) -> set[str]:
    """Return the attributes and items of other libraries' modules and classes that a module binds."""
    names, found = _imported(tree), set()
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "?", ast.Store())]
        for whole in targets:
            for target in whole.elts if isinstance(whole, ast.Tuple) else [whole]:
                root: ast.expr = target
                while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
                    root = root.func if isinstance(root, ast.Call) else root.value
                if root is not target and isinstance(root, ast.Name) and root.id in names:
                    found.add(ast.unparse(target))
    return {text for text in found if text not in LAST and text.split("[")[0] not in OF_THE_PROCESS}


def variables_that_change(tree: ast.Module) -> set[str]:
    """Return the variables of a module in lower case: those in upper case are constants."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = ast.unparse(node.value)
            is_fixed = isinstance(node.value, (ast.Name, ast.Attribute)) or any(word in value for word in FIXED)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and target.id.strip("_").islower() and not is_fixed:
                    found.add(target.id)
    return found - {"logger"} - {name for name in found if name.startswith("__")}


def test_every_file_that_changes_another_library_has_a_row():
    rows = {file for *_, where, _, _ in _rows("**What is changed in other libraries.**") for file in _words(where)}
    assert {file for file, tree in _modules() if changed_of_others(tree)} - rows == set()


def test_every_variable_that_changes_has_a_row_and_every_row_a_variable():
    rows = _rows("**Variables of modules that change.**")
    listed = {(file, name) for where, names, _ in rows for file in _words(where) for name in _words(names)}
    found = {(file, name) for file, tree in _modules() for name in variables_that_change(tree)}
    globals_ = {
        (file, name)
        for file, tree in _modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
        for name in node.names
    }
    # A public table, which users add to, is in upper case all the same.
    assert found | globals_ | {("training/tracking/select.py", "TRACKERS")} == listed


def test_a_change_of_either_kind_is_noticed():
    tree = ast.parse(
        "import torch\nfrom x import C\n_seen = {}\nLIMIT = 3\ntorch.save = C.y[0] = _seen['a'] = 1\nsetattr(C, n, 2)"
    )
    assert changed_of_others(tree) == {"torch.save", "C.y[0]", "C.?"}
    assert variables_that_change(tree) == {"_seen"}
