"""What pickles code and files in other ways than cloudpickle.

Code keeps the name of its file, by which tracebacks and stacks show the user's line: from its version 3.1.3 on,
cloudpickle writes ``<dynamic-code>`` instead. Files are refused, of which cloudpickle sends the content.
"""

from __future__ import annotations

import io
import sys
import types
from collections import ChainMap
from typing import IO, TYPE_CHECKING, Any

import cloudpickle

from nb_accelerate.errors import ShippingError

if TYPE_CHECKING:
    from collections.abc import Callable


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    build, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _build_code, (build, arguments, code.co_filename)


def _build_code(build: Callable[..., types.CodeType], arguments: tuple[Any, ...], filename: str) -> types.CodeType:
    return build(*arguments).replace(co_filename=filename)


def _refuse(file: IO[Any]) -> Any:
    """Refuse a file; a standard stream becomes that of the process that unpickles it."""
    if file is sys.stdout or file is sys.stderr:
        return cloudpickle.Pickler.dispatch_table[io.TextIOWrapper](file)
    name = getattr(file, "name", None)
    path = f", {name!r}," if isinstance(name, (str, bytes)) else ""
    raise ShippingError(f"A file object stays in its process: send its path{path} and open it where it is needed.")


CODE_REDUCERS = ChainMap({types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)
"""The `dispatch_table` of cloudpickle's pickler, but with a reducer of code that keeps the name of its file."""

_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)

REDUCERS = CODE_REDUCERS.new_child(dict.fromkeys(_FILES, _refuse))
"""The same, and files are refused."""
