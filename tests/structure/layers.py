"""The rules of the picture in ``CONTRIBUTING.md``, checked by reading sources, importing nothing.

A room is a package, or a module, below ``training/``, ``base/`` or ``notebook/``. What stands beside these folders is a
room too: a package by its name, a module with its ``.py``.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGE = "nb_accelerate"
PAGE = "CONTRIBUTING.md"
TRAINING, BASE, NOTEBOOK = HALVES = ("training half", "base", "notebook half")
FOLDERS = {"training": TRAINING, "base": BASE, "notebook": NOTEBOOK}
IMPORTS_TORCH = {"torch", "torch_xla", "accelerate", "deepspeed"}
SAYS_NOTHING = {"utils", "util", "helpers", "common", "misc"}


@dataclass(frozen=True)
class Room:
    """Where a room stands in the picture."""

    level: int
    half: str


@dataclass(frozen=True)
class Import:
    """One name that a module imports.

    Attributes:
        line: where.
        module: the dotted name.
        at_import: whether that happens when the module itself is imported.
    """

    line: int
    module: str
    at_import: bool


def read_picture(root: Path) -> dict[str, Room]:
    """The rooms that ``CONTRIBUTING.md`` below ``root`` draws, by name."""
    lines = (root / PAGE).read_text(encoding="utf-8").splitlines()
    head = next((line for line in lines if all(half in line for half in ("level", *HALVES))), None)
    assert head is not None, f"no picture: no line of {PAGE} names level and {HALVES}"
    starts = [(head.index(half), half) for half in HALVES]
    rooms = {}
    for line in lines[lines.index(head) + 1 :]:
        row = re.match(r"\s*(\d+)\s", line)
        if row is None:
            break
        for name in re.finditer(r"\S+", line[row.end() :]):
            column = row.end() + name.start()
            half = max((start, half) for start, half in starts if start <= column)[1]
            rooms[name[0]] = Room(level=int(row[1]), half=half)
    return rooms


def broken_rules(root: Path) -> list[str]:
    """Every rule that the package below ``root`` breaks, one sentence each."""
    package = root / PACKAGE
    rooms = read_picture(root)
    files = sorted(package.rglob("*.py"))
    present = {room for file in files if (room := room_of(file, package)) is not None}
    found = [f"{name} is not in the picture" for name in sorted(present - rooms.keys())]
    found += [f"{name} is in the picture, but does not exist" for name in sorted(rooms.keys() - present)]
    for file in files:
        where = file.relative_to(root).as_posix()
        if file.stem in SAYS_NOTHING:
            found.append(f"{where}: the name says nothing about the subject")
        room = room_of(file, package)
        if room is None:
            continue
        folder = FOLDERS.get(file.relative_to(package).parts[0])
        if room in rooms and folder not in (None, rooms[room].half):
            found.append(f"{where}: {room} is drawn in the {rooms[room].half}")
        if room in rooms:
            found += (f"{where}:{line} {fault}" for line, fault in _faults(file, root, room, rooms))
    return found


def _faults(file: Path, root: Path, room: str, rooms: dict[str, Room]) -> Iterator[tuple[int, str]]:
    here = rooms[room]
    for one in imports_of(file, root):
        if one.at_import and here.half != TRAINING and one.module.split(".")[0] in IMPORTS_TORCH:
            yield one.line, f"{room} ({here.half}) imports {one.module} when it is imported"
        target = _target(one.module, rooms)
        if target is None or target == room:
            continue
        there = rooms[target]
        if there.level >= here.level:
            yield one.line, f"{room} (level {here.level}) imports {target} (level {there.level})"
        if {here.half, there.half} == {TRAINING, NOTEBOOK}:
            yield one.line, f"{room} ({here.half}) imports {target} ({there.half})"


def tree_of(file: Path) -> ast.Module:
    """What a source file has, parsed once for all tests of this process that read the package."""
    return _parsed(file.read_text(encoding="utf-8"))


_parsed = functools.lru_cache(512)(ast.parse)  # as many files as the package has


def imports_of(file: Path, root: Path) -> Iterator[Import]:
    """What a file imports, anywhere in it. ``from a import b`` counts as ``a.b``."""
    tree = tree_of(file)
    parts = file.relative_to(root).with_suffix("").parts
    containing = parts[:-1]
    yield from _walk(tree, containing, at_import=True)


def _walk(node: ast.AST, containing: tuple[str, ...], *, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(child.lineno, alias.name, at_import)
        elif isinstance(child, ast.ImportFrom):
            base = containing[: len(containing) - child.level + 1] if child.level else ()
            module = ".".join([*base, *([child.module] if child.module else [])])
            for alias in child.names:
                yield Import(child.lineno, f"{module}.{alias.name}", at_import)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            for statement in child.body:
                yield from _walk(ast.Module([statement], []), containing, at_import=False)
            for statement in child.orelse:
                yield from _walk(ast.Module([statement], []), containing, at_import=at_import)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _walk(child, containing, at_import=at_import and not inside)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _target(module: str, rooms: dict[str, Room]) -> str | None:
    """The room an imported name is in; None if it is not ours. What `__init__` names itself is in `__init__`."""
    first, *parts = module.split(".")
    if first != PACKAGE:
        return None
    if parts[:1] and parts[0] in FOLDERS:
        return parts[1] if parts[1:] else None
    named = (name for part in parts[:1] for name in (part, f"{part}.py") if name in rooms)
    return next(named, "__init__")


def room_of(file: Path, package: Path) -> str | None:
    """The room that a file is in; None for what says what a half is."""
    first, *rest = file.relative_to(package).parts
    if first in FOLDERS:
        return None if rest == ["__init__.py"] else rest[0].removesuffix(".py")
    return first if rest else first.removesuffix(".py") if first.startswith("__") else first


def circles(root: Path) -> list[set[str]]:
    """Modules that import each other, directly or through others, at any time or for type checkers alone."""
    package = root / PACKAGE
    files = {_name_of(file, root): file for file in package.rglob("*.py")}
    graph = {
        name: {
            found
            for one in imports_of(file, root)
            if (found := _module_of(one.module, files)) is not None and found != name
        }
        for name, file in files.items()
    }
    # Whatever no circle goes through can be taken away, end by end; what is left are circles and what joins two.
    while ends := {name for name in graph if not graph[name] or not any(name in to for to in graph.values())}:
        graph = {name: to - ends for name, to in graph.items() if name not in ends}
    found: list[set[str]] = []
    for name in graph:
        circle = {other for other in _reached(name, graph) if name in _reached(other, graph)}
        if circle and circle not in found:
            found.append(circle)
    return found


def _reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = set(graph[start])
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead |= graph[name]
    return seen


def _name_of(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module_of(dotted: str, files: dict[str, Path]) -> str | None:
    """The module of ours that an imported name is, or is in."""
    while dotted and dotted not in files:
        dotted = dotted.rpartition(".")[0]
    return dotted or None
