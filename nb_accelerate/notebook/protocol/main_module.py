"""Pickle what ``__main__`` defines, for the ``__main__`` of another process.

Plain pickle writes a class or function of ``__main__`` as its name, and looks the name up in ``__main__`` when it
writes and when it reads. So what users' code pickles (``torch.save``, a pool of processes, ``gather_object``) in a
process that was sent a class needs it there by its name.

Code keeps the name of its file, by which tracebacks and stacks show the user's line: from its version 3.1.3 on,
cloudpickle writes ``<dynamic-code>`` instead. Files are refused: cloudpickle would send their content.
"""

from __future__ import annotations

import enum
import functools
import io
import linecache
import operator
import sys
import types
from collections import ChainMap
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle

from nb_accelerate.base.ipython_versions import lines_of_cell
from nb_accelerate.errors import ShippingError
from nb_accelerate.notebook.protocol.counterparts import (
    RULES,
    by_name,
    file_rule,
    plain_state,
    remembering,
    rule_of,
    standing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nb_accelerate.notebook.protocol.counterparts import Rule


class _Writable(Protocol):
    """What pickle writes to."""

    def write(self, data: bytes, /) -> object: ...


class Globals(enum.Enum):
    """The globals that functions of ``__main__`` have where they are unpickled."""

    OWN = enum.auto()  # a dictionary of their own, with what they use

    OF_RECEIVER = enum.auto()  # those of the ``__main__`` there, as they are

    # Those of the ``__main__`` there, with what they use, and with the classes and functions that are pickled.
    OF_RECEIVER_AND_SENT = enum.auto()


class MainPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with a choice of the globals that functions of ``__main__`` have where they are unpickled.

    What stands in ``sys.modules`` by its name is found by that name. Nothing that ``__main__`` defines is.

    Attributes:
        names: at which pickle finds in ``__main__`` the classes and functions that were pickled, unless with
            `Globals.OWN`.
    """

    rules: Mapping[str, Rule] = RULES  # for types, see `counterparts`

    def __init__(self, file: _Writable, *, globals_there: Globals = Globals.OWN, **options: Any) -> None:
        super().__init__(file, **options)
        self._reducers: dict[type, Callable[[Any], Any]] = {}
        self._main = main_globals()
        self._globals = globals_there
        self.names: set[str] = set()
        self.codes: list[types.CodeType] = []  # code of the functions that were pickled with `Globals.OF_RECEIVER`
        self._empty: dict[int, tuple[types.CellType, types.CellType]] = {}

    def _function_getnewargs(self, func: types.FunctionType) -> tuple[Any, ...]:
        code, own_globals, *rest, _ = super()._function_getnewargs(func)
        is_own = self._globals is Globals.OWN or func.__globals__ is not self._main
        # cloudpickle gives each function variables of its own, and two that share one would part ways.
        empty = [self._empty.setdefault(id(cell), (types.CellType(), cell))[0] for cell in func.__closure__ or ()]
        return (code, own_globals if is_own else _MAIN, *rest, tuple(empty) if func.__closure__ else None)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> tuple[Any, ...]:
        make, arguments, (attributes, slots), *rest = super()._dynamic_function_reduce(func)
        if self._globals is Globals.OF_RECEIVER and func.__globals__ is self._main:
            slots["__globals__"] = {}
            self.codes.append(func.__code__)
        return (make, arguments, (attributes, slots), *rest)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce what pickle would not, or by a name that other processes do not have."""
        kind = type(obj)
        reduce = self._reducers.get(kind) or self._reducers.setdefault(kind, self._reducer_of(kind))
        reduced = reduce(obj)
        if self._globals is Globals.OWN or reduced is NotImplemented or len(reduced) < _WITH_SETTER:
            return reduced
        name, *inner = getattr(obj, "__qualname__", "").split(".")
        found: Any = self._main.get(name)
        for part in inner:
            found = getattr(found, part, None)
        if found is not obj or obj.__module__ != self._main.get("__name__"):  # pickle would not find it there
            return reduced
        brought = {name: self._main[name]} if self._globals is Globals.OF_RECEIVER_AND_SENT else {}
        self.names.add(name)
        make, arguments, state, *items, set_state = reduced
        return (make, arguments, (state, set_state, obj.__qualname__, brought), *items, _complete)

    def _reducer_of(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, (type, types.FunctionType)):
            return self._definition
        if issubclass(kind, types.ModuleType):
            return self._module
        rule = rule_of(kind, self.rules)
        if rule is not None:
            return rule
        name = kind.__module__
        if type(sys.modules.get(name)) is kind:  # an object has taken the place of its module
            return lambda obj: (by_name, (name,)) if sys.modules.get(name) is obj else NotImplemented
        registered = self.dispatch_table.get(kind)
        if registered is None and kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
            return lambda _: NotImplemented  # as pickle does
        return functools.partial(self._own_way, registered or operator.methodcaller("__reduce_ex__", 5))

    def _definition(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and reduced[0] is cloudpickle.cloudpickle._make_skeleton_class:  # noqa: SLF001
            reduced = (_make_class, *reduced[1:])
        if reduced is NotImplemented or len(reduced) < _WITH_SETTER or self._is_by_value(obj.__module__):
            return reduced
        # Classes of C may have another name than the one by which they say they are found.
        is_there = standing(obj.__module__, obj.__name__) is obj
        return (by_name, (obj.__module__, obj.__name__)) if is_there else reduced

    def _module(self, module: Any) -> Any:
        name = module.__name__
        if not self._is_by_value(name):
            if sys.modules.get(name) is module:
                return by_name, (name,)
            parent, _, last = name.rpartition(".")
            if parent in sys.modules and getattr(sys.modules[parent], last, None) is module:  # torch.ops.aten
                return by_name, (parent, last)
        return cloudpickle.Pickler.dispatch_table[types.ModuleType](module)

    def _own_way(self, reduce: Callable[[Any], Any], obj: Any) -> Any:
        """Reduce an object as its type says. By a name it is only reduced if that is found in an importable module."""
        reduced = reduce(obj)
        if not isinstance(reduced, str):
            return reduced
        module = getattr(obj, "__module__", None)
        if isinstance(module, str) and not self._is_by_value(module):
            return NotImplemented  # pickle looks there, and tells if it is not there
        if module is None:
            # pickle would ask all modules for it, and some make what they are asked for.
            homes = (name for name in list(sys.modules) if standing(name, reduced) is obj)
            home = next((name for name in homes if not self._is_by_value(name)), None)
            if home is not None:
                return by_name, (home, reduced)
        if hasattr(obj, "cache_parameters"):
            return (*remembering(obj), {}, None, None, _update)
        kind: Any = type(obj)
        if kind.__new__ is object.__new__ and kind.__flags__ & _IS_PYTHONS:
            return plain_state(obj)
        raise ShippingError(
            f"It is found by its name {reduced!r} only, and no module that can be imported has it: make it in the "
            "function or cell that the ranks run."
        )

    def _is_by_value(self, module: str | None) -> bool:
        """Return whether what a module defines is pickled by value: as what ``__main__`` defines is."""
        if module in _MAIN_NAMES:
            return True
        registered = cloudpickle.list_registry_pickle_by_value()
        return any(f"{module}.".startswith(f"{name}.") for name in registered)


def _make_class(constructor: type, name: str, bases: tuple[Any, ...], options: Any, number: str, extra: Any) -> type:
    """Make a class whose attributes are set later, as cloudpickle does, once; ``__init_subclass__`` has run before."""
    made: type | None = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(number)  # noqa: SLF001
    if made is not None:
        return made
    classes = [base for base in types.resolve_bases(bases) if isinstance(base, type)]
    parents = {parent for base in classes for parent in base.__mro__ if parent.__module__ in _MAIN_NAMES}
    hooks = {parent: vars(parent)["__init_subclass__"] for parent in parents if "__init_subclass__" in vars(parent)}
    for parent in hooks:
        del parent.__init_subclass__
    try:
        make = cloudpickle.cloudpickle._make_skeleton_class  # noqa: SLF001
        return make(constructor, name, bases, options, number, extra)  # type: ignore[no-any-return]
    finally:
        for parent, hook in hooks.items():
            parent.__init_subclass__ = hook  # type: ignore[method-assign]


def _update(obj: Any, state: dict[str, Any]) -> None:
    vars(obj).update(state)


_IS_PYTHONS = 1 << 9  # in the flags of a class: it was made while the program runs, and is not one of C

_MAIN_NAMES = frozenset({None, "__main__", "__mp_main__"})

_WITH_SETTER = 6  # length of what cloudpickle reduces to where it sets the state by a function: classes and functions


def _complete(obj: Any, state: tuple[Any, Callable[[Any, Any], object], str, dict[str, Any]]) -> None:
    own_state, set_state, qualname, brought = state
    set_state(obj, own_state)
    obj.__qualname__ = qualname  # cloudpickle loses a nested class's
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
    # `inspect.getsource`, tracebacks and torch.jit.script read the text of its cell, which a pickle has once.
    return _build_code, (build, arguments, code.co_filename, lines_of_cell(code.co_filename))


def _build_code(
    build: Callable[..., types.CodeType], arguments: tuple[Any, ...], filename: str, lines: list[str] | None
) -> types.CodeType:
    if lines is not None:
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    return build(*arguments).replace(co_filename=filename)


# The `dispatch_table` of cloudpickle's pickler, but with a reducer of code that keeps the name of its file.
CODE_REDUCERS = ChainMap({types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)

REDUCERS = CODE_REDUCERS.new_child(dict.fromkeys(_FILES, file_rule))  # the same, and files are refused
