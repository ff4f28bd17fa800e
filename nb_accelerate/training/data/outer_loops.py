"""Find out how many epochs a run has, from the ``for ... in range(...)`` around the loop over a loader.

Only what can be read without running anything counts: ``range`` of whole numbers, of names that hold some where the
loop runs, and of sums and products of those. Everything else (``while``, a list, a call) says nothing.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import operator
import re
from collections import ChainMap
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from nb_accelerate.errors.frame_locals import locals_of
from nb_accelerate.errors.traceback_lines import is_ours, is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}

_IS_BAR = re.compile(r"[/\\]tqdm[/\\]")

_MAGIC = re.compile(r"^([ \t]*)[%!].*$", re.MULTILINE)

_MOST_FILES = 8
"""Files and cells whose loops are remembered."""

_MOST_FILENAMES = 256
"""Names of files of which it is remembered whether they are the user's."""


class _FileLoops(NamedTuple):
    """The ``for`` loops of a file or cell.

    Attributes:
        lines: of the file, as `linecache` has them.
        loops: outer ones first.
        ranges: what `_ranges_around` found, by line.
    """

    lines: list[str]
    loops: list[ast.For]
    ranges: dict[int, list[tuple[ast.expr, ast.Call]]]


_known_loops: dict[str, _FileLoops] = {}
"""By the name of a file."""

_MOST_FRAMES = 40
"""Frames that are looked at, from the inside to the outside."""

_MOST_USER_FRAMES = 4
"""Functions of the user's, one calling the other, in which the loop over epochs is looked for."""


def epoch_around() -> tuple[int, int] | None:
    """Return the number of the current epoch, from 1, and how many there are; None if that cannot be told.

    Loops inside each other, over folds and epochs say, count together. Where a library loops over epochs, as a trainer
    does, what the user loops over is something else: nothing is said then.
    """
    frame: FrameType | None = inspect.currentframe()
    users = 0
    for _ in range(_MOST_FRAMES):
        if frame is None or users == _MOST_USER_FRAMES:
            return None
        filename = frame.f_code.co_filename
        if _is_users(filename):
            users += 1
            found = _in_frame(frame)
            if found is not None:
                return found
        elif not _is_passed(filename):
            return None
        frame = frame.f_back
    return None


_is_users = functools.lru_cache(maxsize=_MOST_FILENAMES)(is_users)


@functools.lru_cache(maxsize=_MOST_FILENAMES)
def _is_passed(filename: str) -> bool:
    """Return whether the loop over epochs may be outside a frame of this file, which is not the user's."""
    return is_ours(filename) or _IS_BAR.search(filename) is not None


def _in_frame(frame: FrameType) -> tuple[int, int] | None:
    ranges = _ranges_around(frame.f_code.co_filename, frame.f_lineno)
    if not ranges:
        return None
    names = ChainMap(locals_of(frame), frame.f_globals)  # type: ignore[arg-type]  # they are only read
    number, epochs = 0, 1
    for target, call in ranges:
        values, current = _range(call, names), _value(target, names)
        if values is None or type(current) is not int or current not in values:
            return None
        number = number * len(values) + values.index(current)
        epochs *= len(values)
    return (number + 1, epochs) if epochs > 1 else None


def _ranges_around(filename: str, line: int) -> list[tuple[ast.expr, ast.Call]]:
    """Return the targets and ``range`` calls of the ``for`` loops around a line of a file or cell, outer ones first."""
    lines = linecache.getlines(filename)
    known = _known_loops.get(filename)
    if known is None or known.lines is not lines:  # `linecache` returns one list as long as a file is the same
        if len(_known_loops) >= _MOST_FILES:
            _known_loops.clear()
        _known_loops[filename] = known = _FileLoops(lines, _parse("".join(lines)), {})
    ranges = known.ranges.get(line)
    if ranges is None:
        loops = [loop for loop in known.loops if loop.body[0].lineno <= line <= _end(loop)]
        known.ranges[line] = ranges = [(loop.target, loop.iter) for loop in loops if _is_range(loop.iter)]
    return ranges


def _parse(source: str) -> list[ast.For]:
    try:
        tree = ast.parse(_MAGIC.sub(r"\1pass", source))
    except (SyntaxError, ValueError):  # it has been changed since, or is no file of Python's
        return []
    return sorted((node for node in ast.walk(tree) if isinstance(node, ast.For)), key=lambda node: node.lineno)


def _end(loop: ast.For) -> int:
    return loop.body[-1].end_lineno or loop.lineno


def _is_range(node: ast.expr) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"


def _range(node: ast.Call, names: Mapping[str, Any]) -> range | None:
    """Return the range that a call makes; None if that cannot be read, or it is empty."""
    if node.keywords or not 1 <= len(node.args) <= 3:
        return None
    values = [_value(one, names) for one in node.args]
    if any(type(value) is not int for value in values) or values[2:] == [0]:
        return None
    return range(*values) or None


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, names), _value(node.right, names)
        return _OPERATORS[type(node.op)](left, right) if type(left) is type(right) is int else None
    return None
