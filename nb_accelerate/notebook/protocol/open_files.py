"""Refuse to pickle file objects. cloudpickle sends the content of text files that can be read, as `io.StringIO`."""

from __future__ import annotations

import io
import sys
from typing import IO, TYPE_CHECKING, Any

import cloudpickle

from nb_accelerate.errors import ShippingError

if TYPE_CHECKING:
    from collections.abc import Callable


def _refuse(file: IO[Any]) -> Any:
    """Refuse a file; a standard stream becomes that of the process that unpickles it.

    Raises:
        ShippingError: it is no standard stream.
    """
    if file is sys.stdout or file is sys.stderr:
        return cloudpickle.Pickler.dispatch_table[io.TextIOWrapper](file)
    name = getattr(file, "name", None)
    path = f", {name!r}," if isinstance(name, (str, bytes)) else ""
    raise ShippingError(f"A file object stays in its process: send its path{path} and open it where it is needed.")


FILE_REDUCERS: dict[type, Callable[[Any], Any]] = dict.fromkeys(
    (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO), _refuse
)
"""Reducers for the `dispatch_table` of a pickler."""
