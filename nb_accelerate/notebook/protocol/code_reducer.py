"""Pickle code with the name of its file, by which tracebacks and stacks show the user's line.

cloudpickle writes ``<dynamic-code>`` instead, from its version 3.1.3 on.
"""

from __future__ import annotations

import types
from collections import ChainMap
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Callable


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    build, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _build_code, (build, arguments, code.co_filename)


def _build_code(build: Callable[..., types.CodeType], arguments: tuple[Any, ...], filename: str) -> types.CodeType:
    return build(*arguments).replace(co_filename=filename)


DISPATCH_TABLE = ChainMap({types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)
"""The `dispatch_table` of cloudpickle's pickler, but with a reducer of code that keeps the name of its file."""
