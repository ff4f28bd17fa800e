"""Guess which epoch it is, of how many, by the loops of users' code as they write them."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import sys
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors.traceback_lines import is_users

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

# A line of a cell that is no Python: `%%distributed`, `!pip ...`.
_MAGIC = re.compile(r"^([ \t]*)[%!].*$", re.MULTILINE)


def epoch_of(frame: FrameType | None) -> tuple[int, int] | None:
    """Return which epoch it is, from 1, of how many, by the loops that code is in; None if there is a doubt.

    What it says is shown, and nothing depends on it: ``for epoch in range(10)`` around the only loop over a loader.
    """
    loops: list[tuple[FrameType, ast.stmt]] = []
    is_innermost = True
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
            over_loader, around = _loops_at(source, frame.f_lineno)
            # What may end before its loader is no epoch.
            if is_innermost and (
                over_loader is None or any(isinstance(node, (ast.Break, ast.Return)) for node in ast.walk(over_loader))
            ):
                return None
            is_innermost = False
            loops += [(frame, loop) for loop in around]
        frame = frame.f_back
    return _in_range(*loops[0]) if len(loops) == 1 else None


@functools.lru_cache(maxsize=64)
def _loops_at(source: str, line: int) -> tuple[ast.stmt | None, Sequence[ast.stmt]]:
    """Return the loop that begins at a line, and the loops around that line in the same function."""
    try:
        nodes = [*ast.walk(ast.parse(_MAGIC.sub(r"\1pass", source)))]
    except (SyntaxError, ValueError, RecursionError):  # a file that has changed since it was imported, say
        return None, ()
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    since = max((node.lineno for node in functions if _spans(node.body, line)), default=0)
    loops = [node for node in nodes if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and node.lineno >= since]
    begins = [
        node for node in loops if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or 0)
    ]
    return (begins[-1] if begins else None), [node for node in loops if _spans(node.body, line) and node not in begins]


def _spans(body: Sequence[ast.stmt], line: int) -> bool:
    return body[0].lineno <= line <= (body[-1].end_lineno or 0)


def _in_range(frame: FrameType, loop: ast.stmt) -> tuple[int, int] | None:
    """Return the number of the pass of a loop, from 1, and of how many, if it is one over a range of known ends."""
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name) or not isinstance(loop.iter, ast.Call):
        return None
    call = loop.iter
    if not isinstance(call.func, ast.Name) or call.func.id != "range" or len(call.args) not in (1, 2):
        return None
    *begin, end = (_value(argument, frame) for argument in call.args)
    start, now = (begin or [0])[0], _value(loop.target, frame)
    if not all(type(number) is int for number in (start, now, end)) or not start <= now < end:
        return None
    return now - start + 1, end - start


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of a number, a name, an attribute of a name, or a sum; None of all else. Runs no user's code."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        names = frame.f_locals
        value = names.get(node.id, frame.f_globals.get(node.id))
        # It is emptied, because until Python 3.13 a frame keeps this dictionary, so the user's model, until it ends.
        # If more than three refer to it (the frame, `names`, and the argument of getrefcount), the program has it too,
        # from `locals()`, and it is left alone.
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13) and sys.getrefcount(names) == 3:
            names.clear()
        return value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return inspect.getattr_static(_value(node.value, frame), node.attr, None)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_value(part, frame) for part in (node.left, node.right)]
        return sum(parts) if all(type(part) is int for part in parts) else None
    return None
