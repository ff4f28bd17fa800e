"""Reads a cell before it runs: its text, and the names it uses. Nothing is run."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.pool.names import free_names

if TYPE_CHECKING:
    from collections.abc import Callable

_ACCELERATOR = re.compile(r"\baccelerator\b")


@dataclass(frozen=True, kw_only=True)
class CellSource:
    """A cell that compiles.

    Attributes:
        code: what ranks run, as it was written.
        filename: its name in tracebacks.
        text: all of the cell, with the line of the magic.
        above: number of lines of `text` above the body.
        free: names it reads.
        is_python: IPython has nothing to transform in it.
    """

    code: str
    filename: str
    text: str
    above: int
    free: frozenset[str]
    is_python: bool

    @property
    def wants_accelerator(self) -> bool:
        """The cell uses the name ``accelerator``, or its text has the word."""
        return _ACCELERATOR.search(self.code) is not None or "accelerator" in self.free


def read_cell(
    code: str, *, filename: str = "<cell>", head: str | None = None, transform: Callable[[str], str] = str
) -> CellSource:
    """Check a cell.

    Args:
        code: the body.
        filename: its name in tracebacks.
        head: the line above the body, without its newline; None if there is none.
        transform: makes Python of magics.

    Raises:
        SyntaxError: it does not compile; with its line in the whole cell.
    """
    text = code if head is None else f"{head}\n{code}"
    above = 0 if head is None else 1
    try:
        source = transform(code)
        tree = ast.parse(source, filename)
        compile(tree, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        raise _moved_down(error, filename, above) from None
    return CellSource(
        code=code,
        filename=filename,
        text=text,
        above=above,
        free=frozenset(free_names(tree)),
        is_python=source.rstrip("\n") == code.rstrip("\n"),
    )


def _moved_down(error: SyntaxError, filename: str, above: int) -> SyntaxError:
    error.filename = filename
    if error.lineno is not None:
        error.lineno += above
    if error.end_lineno is not None:
        error.end_lineno += above
    return error
