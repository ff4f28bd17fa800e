"""Find out how many epochs a run has, from the ``for ... in range(...)`` around the loop over a loader.

Only what can be read without running anything counts: ``range`` of whole numbers, of names that hold some where the
loop runs, and of sums and products of those. Everything else (``while``, a list, a call) says nothing.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
from collections import ChainMap
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors.frame_locals import locals_of
from nb_accelerate.errors.traceback_lines import is_ours, is_users

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

_ARITHMETIC = (ast.Constant, ast.Name, ast.expr_context, ast.BinOp, ast.Add, ast.Sub, ast.Mult)

_IS_BAR = re.compile(r"[/\\]tqdm[/\\]")
_MAGIC = re.compile(r"^([ \t]*)[%!].*$", re.MULTILINE)

_MOST_USER_FRAMES = 4
"""Functions of the user's, one calling the other, in which the loop over epochs is looked for."""


def epoch_around() -> tuple[int, int] | None:
    """Return the number of the current epoch, from 1, and how many there are; None if that cannot be told.

    Loops inside each other, over folds and epochs say, count together. Where a library loops over epochs, as a trainer
    does, what the user loops over is something else: nothing is said then.
    """
    frame: FrameType | None = inspect.currentframe()
    num_users = 0
    while frame is not None and num_users < _MOST_USER_FRAMES:
        filename = frame.f_code.co_filename
        if is_users(filename):
            num_users += 1
            found = _in_frame(frame)
            if found is not None:
                return found
        elif not (is_ours(filename) or _IS_BAR.search(filename)):
            return None
        frame = frame.f_back
    return None


def _in_frame(frame: FrameType) -> tuple[int, int] | None:
    loops = _loops_in("".join(linecache.getlines(frame.f_code.co_filename)))
    around = [loop for loop in loops if loop.body[0].lineno <= frame.f_lineno <= (loop.body[-1].end_lineno or 0)]
    names = ChainMap(locals_of(frame), frame.f_globals) if around else {}  # type: ignore[arg-type]  # only read
    number, epochs = 0, 1
    for loop in around:
        if not (isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "range"):
            continue
        values = _range(loop.iter, names)
        current = names.get(loop.target.id) if isinstance(loop.target, ast.Name) else None
        if values is None or type(current) is not int or current not in values:
            return None
        number = number * len(values) + values.index(current)
        epochs *= len(values)
    return (number + 1, epochs) if epochs > 1 else None


@functools.lru_cache(maxsize=8)
def _loops_in(source: str) -> list[ast.For]:
    """Return the ``for`` loops of a file or cell, outer ones first."""
    try:
        tree = ast.parse(_MAGIC.sub(r"\1pass", source))
    except (SyntaxError, ValueError):  # it has been changed since, or is no file of Python's
        return []
    return sorted((node for node in ast.walk(tree) if isinstance(node, ast.For)), key=lambda node: node.lineno)


def _range(call: ast.Call, names: Mapping[str, Any]) -> range | None:
    """Return the range that a call makes; None if that takes more than arithmetic of whole numbers."""
    parts = [part for argument in call.args for part in ast.walk(argument)]
    used = {part.id: names.get(part.id) for part in parts if isinstance(part, ast.Name)}
    is_arithmetic = all(isinstance(part, _ARITHMETIC) for part in parts)
    if call.keywords or not is_arithmetic or any(type(value) is not int for value in used.values()):
        return None
    try:
        made: range = eval(compile(ast.Expression(call), "", "eval"), {"range": range}, used)  # noqa: S307 - arithmetic
    except (TypeError, ValueError):  # the text has been changed since the loop began
        return None
    return made
