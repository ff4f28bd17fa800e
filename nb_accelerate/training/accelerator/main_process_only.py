"""Tell from the lines that call whether only the main process comes here, as ``save_state`` is called in some scripts.

Nothing is asked of the other processes. What cannot be read in the source (an ``else``, a variable) says nothing: the
others are then waited for, as in any collective.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from typing import TYPE_CHECKING

from nb_accelerate.errors.traceback_lines import is_ours, is_users
from nb_accelerate.training.process import main_process

if TYPE_CHECKING:
    from types import FrameType

_MAGIC = re.compile(r"^([ \t]*)[%!].*$", re.MULTILINE)

_ENGINES = ("DEEPSPEED", "FSDP")
"""Kinds of training in which all processes save; scripts ask ``is_main_process or distributed_type == DEEPSPEED``."""


def is_under_main_process() -> bool:
    """Return whether a caller is in the body of an ``if accelerator.is_main_process``, or ``@on_main_process``."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the standard library does the same
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename == main_process.__file__:
            return True
        if not is_ours(filename) and is_users(filename) and _in_branch(filename, frame.f_lineno):
            return True
        frame = frame.f_back
    return False


def _in_branch(filename: str, line: int) -> bool:
    try:
        tree = ast.parse(_MAGIC.sub(r"\1pass", "".join(linecache.getlines(filename))))
    except (SyntaxError, ValueError):  # it has been changed since, or is no file of Python's
        return False
    return any(
        isinstance(node, ast.If)
        and not node.orelse
        and node.body[0].lineno <= line <= (node.body[-1].end_lineno or line)
        and _is_main_only(node.test)
        for node in ast.walk(tree)
    )


def _is_main_only(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_main_only, test.values))
    if isinstance(test, ast.BoolOp):
        others = [ast.unparse(value) for value in test.values if not _is_main_only(value)]
        return len(others) < len(test.values) and all(any(name in other for name in _ENGINES) for other in others)
    return isinstance(test, ast.Attribute | ast.Name) and ast.unparse(test).split(".")[-1] == "is_main_process"
