"""Find the global names that compiled code reads. Pure: nothing is run."""

from __future__ import annotations

import dis
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_READS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
_BINDS = {"STORE_NAME", "STORE_GLOBAL"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


def names_in(code: types.CodeType) -> set[str]:
    """Return the global names that a function reads, with those of functions and classes defined in it."""
    return own_names(code)[0].union(*(names_in(inner) for inner in inner_codes(code)))


def own_names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the global names that code itself reads, but for those bound by then, and those it binds for certain.

    Certain is what comes before the first branch.
    """
    reads: set[str] = set()
    binds: set[str] = set()
    is_straight = not getattr(code, "co_exceptiontable", b"")
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS and instruction.argval not in binds:
            reads.add(instruction.argval)
        elif instruction.opname in _BINDS and is_straight:
            binds.add(instruction.argval)
        elif instruction.opcode in _JUMPS:
            is_straight = False
    return reads, binds


def inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code objects of functions, classes and comprehensions that are defined directly in another one."""
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
