"""The halves meet in `base/seam.py`: neither reaches over by names in texts, by `sys.modules` or through memory."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from structure.layers import tree_of

PACKAGE = Path(__file__).parents[2] / "nb_accelerate"
OTHER_HALF = {"notebook": "nb_accelerate.training", "training": "nb_accelerate.notebook"}
SEEN_BY_IMPORTED = ("torch", "transformers", "nb_accelerate.training")
"""Libraries at which the notebook half looks by `base.imported`, or not at all."""

TOLD_BY_THE_USER = {
    # What an object that is pickled says of itself.
    "notebook/protocol/counterparts.py": ["module"],
    "notebook/protocol/main_module.py": ["name", "parent"],
    "notebook/worker/namespace.py": ["name"],
}
"""Keys of ``sys.modules`` that are no constants: modules that the user loads anew."""


def reaches(tree: ast.Module, half: str) -> list[str]:
    """What a file does to reach over to the other half."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            if str(node.value).startswith(OTHER_HALF[half]):
                found.append(f"names {node.value}")
        elif (
            half == "notebook"
            and isinstance(node, ast.Attribute)
            and ast.unparse(node) in ("gc.get_objects", "gc.get_referrers")
        ):
            found.append(f"searches with {ast.unparse(node)}")
    return found


def keys_of_modules(tree: ast.Module) -> list[str]:
    """The keys by which a file looks into ``sys.modules``, as they are written."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
            found.append(ast.unparse(node.slice))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "sys.modules.get":
            found.append(ast.unparse(node.args[0]))
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "sys.modules":
            found.append(ast.unparse(node.left))
    return found


@pytest.mark.parametrize("half", OTHER_HALF)
def test_no_half_reaches_over_to_the_other(half: str):
    files = [*(PACKAGE / half).rglob("*.py")]
    assert files
    assert {str(file): found for file in files if (found := reaches(tree_of(file), half))} == {}


def test_the_notebook_half_looks_at_what_is_imported_in_one_way():
    refused = {}
    for file in (PACKAGE / "notebook").rglob("*.py"):
        keys = keys_of_modules(tree_of(file))
        name = file.relative_to(PACKAGE).as_posix()
        strange = [key for key in keys if key[0] not in "'\"" or key.strip("'\"").startswith(SEEN_BY_IMPORTED)]
        if sorted(set(strange)) != TOLD_BY_THE_USER.get(name, []):
            refused[name] = strange
    assert refused == {}


def test_reaching_over_is_noticed():
    for source, half, found in (
        ("import gc\n[one for one in gc.get_objects()]", "notebook", ["searches with gc.get_objects"]),
        ("f('nb_accelerate.training.data:x')", "notebook", ["names nb_accelerate.training.data:x"]),
        ("'''nb_accelerate.training'''", "notebook", []),
        ("f('nb_accelerate.notebook.pool')", "training", ["names nb_accelerate.notebook.pool"]),
    ):
        assert reaches(ast.parse(source), half) == found
    assert keys_of_modules(ast.parse("sys.modules['a'], sys.modules.get(b), 'c' in sys.modules")) == ["'a'", "b", "'c'"]
