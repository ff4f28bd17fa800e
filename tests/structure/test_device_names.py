"""A type of device is one row of the table: code outside of ``base/devices/`` asks the row, and names no device."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from structure.layers import tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).parents[2] / "nb_accelerate"

NAMES = {"cuda", "xpu", "mps"}

PUBLIC = {
    "compat/capabilities.py": {
        "is_cuda_available",
        "is_mps_available",
        "is_xpu_available",
        "check_cuda_fp8_capability",
    },
    "training/process/rng.py": {"RNGType"},
}
"""Functions and classes whose own names, which are accelerate's, have one in them."""


def names_in(tree: ast.Module, public: set[str]) -> Iterator[int]:
    """Yield the lines in which code names a type of device: ``"cuda"``, ``torch.cuda``, or the module of its row."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in public:
            continue
        if (isinstance(node, ast.Constant) and node.value in NAMES) or (
            isinstance(node, ast.Attribute) and node.attr in NAMES and isinstance(node.value, ast.Name)
        ):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] in NAMES:
            yield node.lineno
        pending += ast.iter_child_nodes(node)


def test_only_the_device_table_and_public_names_name_a_type_of_device() -> None:
    found = [
        f"{name}:{line}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if not (name := file.relative_to(PACKAGE).as_posix()).startswith("base/devices/")
        for line in names_in(tree_of(file), PUBLIC.get(name, set()))
    ]
    assert found == []


def test_a_name_is_found_however_it_is_written() -> None:
    code = "import torch\nif x.type == 'cuda':\n    torch.cuda.synchronize()\nfrom base.devices.xpu import XPU\n"
    assert sorted(names_in(ast.parse(code), set())) == [2, 3, 4]
