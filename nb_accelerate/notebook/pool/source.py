"""Read a cell before it runs: check its syntax, and find the names that it uses. Nothing is run."""

from __future__ import annotations
import __future__

import ast
import re
import symtable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.pool.names import calls_of, names_of

if TYPE_CHECKING:
    from collections.abc import Callable

_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")
_ACCELERATOR = re.compile(r"\baccelerator\b")


@dataclass(frozen=True, kw_only=True)
class CellSource:
    """A cell whose syntax is right."""

    code: str
    filename: str
    text: str  # the whole cell, with the line of the magic
    above: int  # number of lines of `text` above the body
    free: frozenset[str]  # names that it may read before it has stored them
    stored: frozenset[str]  # names that it has stored, or deleted, for certain when it ends well
    calls: frozenset[str]  # names of functions that it calls for certain: those of its statements that are one call
    is_python: bool  # whether there is nothing in it that IPython has to transform

    @property
    def wants_accelerator(self) -> bool:
        """Whether it uses the name ``accelerator``, or has the word in a magic or a string."""
        return _ACCELERATOR.search(self.code) is not None or "accelerator" in self.free


def read_cell(
    code: str, *, filename: str = "<cell>", head: str | None = None, transform: Callable[[str], str] = str
) -> CellSource:
    """Return a cell as data. Line numbers of a SyntaxError count from its head, the line above the body."""
    text = code if head is None else f"{head}\n{code}"
    # IPython drops blank lines at the top, and would number the other lines without them.
    code = _BLANK_LINES.sub("", code)
    above = text.count("\n") - code.count("\n")
    try:
        source = transform(code)
        tree = ast.parse(source, filename)
        compiled = compile(tree, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        error.filename = filename
        error.lineno = error.lineno and error.lineno + above
        error.end_lineno = error.end_lineno and error.end_lineno + above
        raise error from None
    free, stored = names_of(tree, compiled.co_flags & __future__.annotations.compiler_flag)
    return CellSource(
        code=code,
        filename=filename,
        text=text,
        above=above,
        free=frozenset(free),
        stored=frozenset(stored),
        calls=frozenset(calls_of(tree)),
        is_python=source.rstrip("\n") == code.rstrip("\n"),
    )


def as_function(source: CellSource, transform: Callable[[str], str], variables: dict[str, Any]) -> Callable[[], None]:
    """Return a cell as a function of the notebook that sets its names as the cell would."""
    python = transform(source.code)
    symbols = symtable.symtable(python, source.filename, "exec").get_symbols()
    body: Any = ast.parse("def cell(): pass", source.filename)
    names = [one.get_name() for one in symbols if one.is_assigned() or one.is_imported()]
    statements = ast.increment_lineno(ast.parse(python, source.filename), source.above).body
    body.body[0].body = [*([ast.Global(names)] if names else []), *statements]
    try:
        module = compile(ast.fix_missing_locations(body), source.filename, "exec", dont_inherit=True)
    except SyntaxError as error:  # of await, and of names that nobody knows
        raise ConfigError(
            f"This cell cannot be rehearsed as it is: {error.msg}. Leave that out, or rehearse a function of the "
            "notebook: rehearse(train)"
        ) from None
    code = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
    return FunctionType(code, variables)
