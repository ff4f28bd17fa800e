"""Pickle what ``__main__`` defines, for the ``__main__`` of another process.

Plain pickle writes a class or function of ``__main__`` as its name, and looks the name up in ``__main__`` when it
writes and when it reads. So what users' code pickles (``torch.save``, a pool of processes, ``gather_object``) in a
process that was sent a class needs it there by its name.

Code keeps the name of its file, by which tracebacks and stacks show the user's line: from its version 3.1.3 on,
cloudpickle writes ``<dynamic-code>`` instead. Files are refused, of which cloudpickle sends the content.
"""

from __future__ import annotations

import enum
import io
import sys
import types
from collections import ChainMap
from typing import IO, TYPE_CHECKING, Any, Protocol

import cloudpickle

from nb_accelerate.errors import ShippingError

if TYPE_CHECKING:
    from collections.abc import Callable


class _Writable(Protocol):
    """What pickle writes to."""

    def write(self, data: bytes, /) -> object: ...


class Globals(enum.Enum):
    """The globals that functions of ``__main__`` have where they are unpickled."""

    OWN = enum.auto()
    """A dictionary of their own, with what they use."""

    FOUND = enum.auto()
    """Those of the ``__main__`` there, as they are."""

    BROUGHT = enum.auto()
    """Those of the ``__main__`` there, with what they use, and with the classes and functions that are pickled."""


class MainPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with a choice of the globals that functions of ``__main__`` have where they are unpickled.

    Attributes:
        names: at which pickle finds in ``__main__`` the classes and functions that were pickled, unless with
            `Globals.OWN`.
        codes: code of the functions that were pickled with `Globals.FOUND`.
    """

    def __init__(self, file: _Writable, *, globals_there: Globals = Globals.OWN, **options: Any) -> None:
        super().__init__(file, **options)
        self._main = main_globals()
        self._globals = globals_there
        self.names: set[str] = set()
        self.codes: list[types.CodeType] = []
        self._empty: dict[int, tuple[types.CellType, types.CellType]] = {}

    def _function_getnewargs(self, func: types.FunctionType) -> tuple[Any, ...]:
        code, own_globals, *rest, _ = super()._function_getnewargs(func)
        is_own = self._globals is Globals.OWN or func.__globals__ is not self._main
        # cloudpickle gives each function variables of its own, and two that share one would part ways.
        empty = [self._empty.setdefault(id(cell), (types.CellType(), cell))[0] for cell in func.__closure__ or ()]
        return (code, own_globals if is_own else _MAIN, *rest, tuple(empty) if func.__closure__ else None)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> tuple[Any, ...]:
        make, arguments, (attributes, slots), *rest = super()._dynamic_function_reduce(func)
        if self._globals is Globals.FOUND and func.__globals__ is self._main:
            slots["__globals__"] = {}
            self.codes.append(func.__code__)
        return (make, arguments, (attributes, slots), *rest)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a class or function that is pickled by value; ``NotImplemented`` for anything else."""
        reduced = super().reducer_override(obj)
        if self._globals is Globals.OWN or reduced is NotImplemented or len(reduced) < _WITH_SETTER:
            return reduced
        name, *inner = obj.__qualname__.split(".")
        found: Any = self._main.get(name)
        for part in inner:
            found = getattr(found, part, None)
        if found is not obj or obj.__module__ != self._main.get("__name__"):  # pickle would not find it there
            return reduced
        brought = {name: self._main[name]} if self._globals is Globals.BROUGHT else {}
        self.names.add(name)
        make, arguments, state, *items, set_state = reduced
        return (make, arguments, (state, set_state, obj.__qualname__, brought), *items, _complete)


_WITH_SETTER = 6
"""Length of what cloudpickle reduces to where it sets the state by a function: classes and functions."""


def _complete(obj: Any, state: tuple[Any, Callable[[Any, Any], object], str, dict[str, Any]]) -> None:
    own_state, set_state, qualname, brought = state
    set_state(obj, own_state)
    obj.__qualname__ = qualname  # cloudpickle forgets that of a nested class
    main_globals().update(brought)


class _Main:
    """Is pickled in place of the globals of ``__main__``; becomes those of the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return main_globals, ()


_MAIN = _Main()


def main_globals() -> dict[str, Any]:
    """Return the variables of ``__main__`` of this process, as it is now: a rank replaces the module."""
    return sys.modules["__main__"].__dict__


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
