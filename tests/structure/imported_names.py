"""The names that libraries import from accelerate, by reading their newest releases: ``imported_names.txt``.

``python tests/structure/imported_names.py`` downloads them from PyPI and writes the list, a name and its users a line.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LIST = Path(__file__).with_suffix(".txt")
LIBRARIES = ("diffusers", "peft", "transformers", "trl")


def names_in(source: str) -> set[str]:
    """Return the dotted names that a source imports from accelerate, or looks up in it."""
    tree = ast.parse(source)
    found = set(_imported(tree))
    if not found:  # ``accelerate`` is something else here: a module beside it, a variable
        return set()
    looked_up = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return found | {name for name in looked_up if name.startswith("accelerate.")}


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] == "accelerate")


def read_list() -> dict[str, list[str]]:
    """Return the users of each name in the list."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return {name: users.split() for name, _, users in (line.partition(" ") for line in lines if line[0] != "#")}


def write_list(folder: Path) -> None:
    """Write the list from wheels in a folder."""
    users: dict[str, list[str]] = {}
    wheels = sorted(folder.glob("*.whl"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            sources = [archive.read(file).decode() for file in archive.namelist() if file.endswith(".py")]
        for name in set().union(*(names_in(source) for source in sources if "accelerate" in source)):
            users.setdefault(name, []).append(wheel.name.partition("-")[0])
    versions = ", ".join(" ".join(wheel.name.split("-")[:2]) for wheel in wheels)
    lines = [f"# What is imported from accelerate by {versions}. Made by {Path(__file__).name}."]
    lines += [f"{name} {' '.join(users[name])}" for name in sorted(users)]
    LIST.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *LIBRARIES]
        subprocess.run(command, check=True)
        write_list(Path(folder))
