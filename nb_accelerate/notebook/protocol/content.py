"""Read what an object holds, so that a change in place is noticed and the object keeps its identity on another process.

A value is read as a flat list of *tokens*: numbers and texts as they are, and of each object in it an id that no other
object ever gets. As long as two lists are equal, nothing has changed. The kernel does this before each cell, so it has
to be quick: of a tensor its version counter is read, of an array a checksum.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import itertools
import operator
import pickle
import time
import types
import weakref
import zlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.imported import imported
from nb_accelerate.notebook.protocol.main_module import main_globals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Read = Callable[["Snapshot", Any], None]

MAX_BYTES = 1 << 20  # Bytes of an array, or of a pickle, that are summed up. It takes 0.2 ms.

_MAX_ITEMS = 10_000  # Items of all lists and dictionaries in a value that are read. They take 1 ms.
_MAX_TOKENS = 34_000  # tokens of a value that are read: of a model with 2,000 modules


_MAX_TEXT = 1000  # characters of a text that is a token
_MAX_SECONDS = 2e-3  # For what a type does to pickle an object of it. One that takes longer is not read again.

ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), type(...), range, slice, types.CodeType})
# Types that are read as a part of the object that holds them. Most have no weak references.
CONTAINERS = (list, dict, tuple, set, frozenset, deque)

_CHILDREN = ("_modules", "_parameters", "_buffers")
_BY_NAME = (
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
)
_NO_ATTRIBUTES = frozenset({"__dict__", "__weakref__", "_abc_impl"})


class ObjectIds:
    """Gives each object that has weak references an id. Unlike that of ``id()``, no other object ever gets it.

    The first one is larger than the numbers that users have in their objects.

    Attributes:
        slow: ids of objects that took longer than `_MAX_SECONDS` to pickle: they are not read again.
        first_words: the address, and a view, of the first four bytes of each tensor on the CPU, by its ``id()``: writes
            by ``.data`` do not change the version of a tensor. An entry goes with its tensor.
    """

    def __init__(self, first: int = 1 << 40) -> None:
        self.entries: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._next = itertools.count(first)
        self.slow: set[int] = set()
        self.first_words: dict[int, tuple[int, ctypes.c_uint32]] = {}

    def get(self, value: object) -> int | None:
        """Return the id of an object; None if it has none yet."""
        entry = self.entries.get(id(value))
        return None if entry is None else entry[0]

    def assign(self, value: object) -> int | None:
        """Return the id of an object; None if it has no weak references."""
        entry = self.entries.get(id(value))
        if entry is not None:
            return entry[0]
        try:
            return self.register(next(self._next), value)
        except TypeError:
            return None

    def register(self, object_id: int, value: object) -> int:
        """Give an object the id that it has in another process. Raises TypeError if it has no weak references."""
        self.entries[id(value)] = object_id, weakref.ref(value, functools.partial(self._forget, id(value)))
        return object_id

    def _forget(self, address: int, _: object) -> None:
        object_id, _ = self.entries.pop(address)
        self.first_words.pop(address, None)
        self.slow.discard(object_id)
        self.on_end(object_id)

    def on_end(self, object_id: int) -> None:
        """Take note of the end of an object."""


class Snapshot:
    """What a value holds at this moment. Do not store one: it keeps the objects in the value alive.

    Args:
        deep: read the objects in it too, and what they hold.
        moves: a tensor that is moved to another address has not changed.

    Attributes:
        visited: ``id()`` of the containers, variables of closures and other objects without ids that were read.
        is_partial: something was left out, because it is too large or cannot be read.
    """

    def __init__(self, value: Any, ids: ObjectIds, *, deep: bool = True, moves: bool = False) -> None:
        self.tokens: list[Any] = []
        self.objects: dict[int | None, Any] = {}
        self.is_partial = False
        self.ids = ids
        self.moves = moves
        self._items_left = _MAX_ITEMS
        self._ends: list[int] = []
        self._last_match: list[Any] | None = None
        self.visited: set[int] = set()
        object_id = None if issubclass(type(value), CONTAINERS) else ids.assign(value)
        self.value = value
        self.objects[object_id] = value
        self._waiting: list[Any] = []
        self._read(value, Snapshot.add if object_id is None else None)
        for part in self._waiting if deep else ():  # it grows meanwhile
            if len(self.tokens) > _MAX_TOKENS:
                self.is_partial = True
                break
            self._read(part)

    def _read(self, part: Any, reader: Read | None = None) -> None:
        kind = type(part)
        try:
            (reader or _readers.get(kind) or _reader(kind))(self, part)
        except Exception:  # users' code takes part
            _leave_out(self)
        self._ends.append(len(self.tokens))

    def parts(self, name: str) -> dict[int | str, list[Any]]:
        """Return the tokens of each object by its id; those of a value without one by `name`."""
        spans = zip(self.objects, (0, *self._ends), self._ends, strict=False)
        return {name if object_id is None else object_id: self.tokens[start:end] for object_id, start, end in spans}

    def matches(self, tokens: list[Any] | None) -> bool:
        """Return whether the value holds what an earlier list of tokens says."""
        if tokens is None:
            return False
        if self._last_match is not tokens:  # ranks that have the same share one list, which is compared once
            self._last_match = tokens if tokens == self.tokens else None
        return self._last_match is not None

    def codes(self) -> list[types.CodeType]:
        """Return the code of the functions of ``__main__`` that were read."""
        main = main_globals()
        functions = [value for value in self.objects.values() if type(value) is types.FunctionType]
        return [function.__code__ for function in functions if function.__globals__ is main]

    def add(self, value: Any) -> None:
        kind = type(value)
        if kind in ATOMS:
            is_long = kind in (str, bytes) and len(value) > _MAX_TEXT
            self.tokens.append(hash(value) if is_long else value)  # a token is kept, and must not keep much
        elif issubclass(kind, CONTAINERS):
            self._container(value)
        elif is_constant(value):
            self.tokens.append(id(value))
        elif kind is types.MethodType:
            self.add(value.__func__)
            self.add(value.__self__)
        else:
            object_id = self.read_later(value)
            if object_id is not None:
                self.tokens.append(object_id)
            elif id(value) not in self.visited:
                self.visited.add(id(value))
                _reader(kind)(self, value)

    def read_later(self, value: Any) -> int | None:
        """Have an object read after this one. Return its id; None if it has none, and is not read."""
        object_id = self.ids.assign(value)
        if object_id is not None and object_id not in self.objects:
            self.objects[object_id] = value
            self._waiting.append(value)
        return object_id

    def _container(self, value: Any) -> None:
        self.tokens.append(len(value))
        self._items_left -= len(value)
        if self._items_left < 0:
            self.is_partial = True
        elif id(value) not in self.visited:  # one may hold itself
            self.visited.add(id(value))
            if issubclass(type(value), dict):
                for key, part in dict.items(value):
                    self.add(key)
                    self.add(part)
            else:
                for part in value:
                    self.add(part)
        if hasattr(value, "__dict__"):
            self.add(vars(value))


# The id, if there is one, and the class of each object in a value, in the order in which they are read.
Structure = list[tuple[int | None, str]]


def structure(snapshot: Snapshot) -> Structure:
    """Return which objects a value holds."""
    return [(object_id, type(value).__qualname__) for object_id, value in snapshot.objects.items()]


def is_constant(value: Any) -> bool:
    """Return whether a value cannot change, or is found by its name in every process."""
    kind = type(value)
    is_defined = issubclass(kind, (type, types.FunctionType))
    return kind in ATOMS or issubclass(kind, _BY_NAME) or (is_defined and value.__module__ != "__main__")


_readers: dict[type, Read] = {}


def _reader(kind: type) -> Read:
    torch = imported("torch")
    found = _readers.get(kind) or _reader_of(kind, torch)
    # Classes of the notebook come and go, and while torch is being imported, its classes are not known.
    if kind.__module__ != "__main__" and (torch is None or hasattr(torch, "optim")):
        _readers[kind] = found
    return found


def _reader_of(kind: type, torch: Any) -> Read:
    if issubclass(kind, type):
        return _class
    if issubclass(kind, types.FunctionType):
        return _function
    if hasattr(torch, "optim"):
        if issubclass(kind, torch.Tensor):
            return _tensor
        if issubclass(kind, torch.nn.Module):
            return _module
        if issubclass(kind, torch.optim.Optimizer):
            return _optimizer
    numpy: Any = imported("numpy")
    if hasattr(numpy, "ndarray") and issubclass(kind, numpy.ndarray):
        return _array
    # What a type does to pickle its objects may say more, or less, than their attributes.
    is_plain = kind is types.SimpleNamespace or (
        kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
        and kind not in copyreg.dispatch_table
    )
    has_attributes = kind.__dictoffset__ or copyreg._slotnames(kind)  # type: ignore[attr-defined]  # noqa: SLF001
    return _attributes if is_plain and has_attributes else _opaque


def _tensor(snapshot: Snapshot, value: Any) -> None:
    """Read the version counter of a tensor, and its first numbers: ``.data`` writes do not change the counter."""
    try:
        if snapshot.moves:
            first = value.detach()[(slice(0, 2),) * value.ndim].tolist()
            address, head = 0, zlib.crc32(str(first).encode())
        else:
            address, first_words = value.data_ptr(), snapshot.ids.first_words
            known, reader = first_words.get(id(value), (0, None))
            if known != address:
                reader = None
                if value.is_cpu and value.is_contiguous() and value.nbytes >= 4:
                    first_words[id(value)] = address, (reader := ctypes.c_uint32.from_address(address))
            head = reader.value if reader is not None else 0
        snapshot.tokens += (value._version, value.requires_grad, address, head)  # noqa: SLF001 - there is no public name
    except Exception:  # of inference mode, not initialized, or without memory of its own
        snapshot.tokens.append(value.requires_grad)
        snapshot.is_partial = True


def _module(snapshot: Snapshot, value: Any) -> None:
    """Read a module, but not whether it is training: `model.eval()` is no change."""
    _class_of(snapshot, value)
    append, entries, objects = snapshot.tokens.append, snapshot.ids.entries, snapshot.objects
    attributes = vars(value)
    for part in map(attributes.get, _CHILDREN):
        if part:
            for name, child in part.items():
                append(name)
                entry = entries.get(id(child))
                if entry is not None and entry[0] in objects:
                    append(entry[0])
                else:
                    append(child if child is None else snapshot.read_later(child))
    names, get_hooks = _attributes_of_all_modules()
    for name, part in attributes.items():
        if name not in names:
            snapshot.add(part)
    hooks = get_hooks(attributes)
    if any(hooks):
        for part in hooks:
            snapshot.add(part)


@functools.cache
def _attributes_of_all_modules() -> tuple[frozenset[str], operator.itemgetter[Any]]:
    """Return the attributes that every module has, and what gets those of them that hold hooks."""
    names = vars(imported("torch").nn.Module())
    return frozenset(names), operator.itemgetter(*(name for name in names if name.endswith("_hooks")))


@functools.cache
def _attributes_of_this_process() -> frozenset[str]:
    """Return the attributes of optimizers that stay on a process: hooks, say, and the ``step`` of its scheduler."""
    torch = imported("torch")
    return frozenset(vars(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.1))) - {
        "defaults",
        "state",
        "param_groups",
    } | {"step"}


def attributes_of_optimizer(value: Any) -> dict[str, Any]:
    """Return the attributes that rebuild an optimizer. torch pickles fewer: LBFGS has a list of its parameters."""
    return {name: part for name, part in vars(value).items() if name not in _attributes_of_this_process()}


def _optimizer(snapshot: Snapshot, value: Any) -> None:
    attributes = attributes_of_optimizer(value)
    groups = enumerate(attributes.pop("param_groups"))
    _add_scalars(snapshot, (((index, name), part) for index, group in groups for name, part in group.items()))
    for part in attributes.values():
        snapshot.add(part)


class Scalars(dict[Any, Any]):
    """A token: the plain numbers and texts among the attributes of an object, or in the groups of an optimizer.

    Each by its name; in an optimizer by the index of the group and the name. They can be changed one by one.
    """


def _add_scalars(snapshot: Snapshot, items: Iterable[tuple[Any, Any]]) -> None:
    scalars = Scalars()
    snapshot.tokens.append(scalars)
    for name, part in items:
        kind = type(part)
        if (kind in ATOMS and not (kind in (str, bytes) and len(part) > _MAX_TEXT)) or (
            kind is tuple and ATOMS.issuperset(map(type, part))
        ):
            scalars[name] = part
        else:
            snapshot.tokens.append(name)
            snapshot.add(part)


@dataclass(frozen=True)
class Edit:
    """Settings of an object that are to be other ones, or to be gone."""

    changed: dict[Any, Any]
    gone: tuple[Any, ...] = ()

    @classmethod
    def between(cls, before: list[Any], now: list[Any]) -> Edit:
        """Return how the settings among the tokens of an object have changed."""
        old, new = _scalars_in(before), _scalars_in(now)
        changed = {name: part for name, part in new.items() if name not in old or old[name] != part}
        return cls(changed, tuple(name for name in old if name not in new and name not in now))

    def apply(self, tokens: list[Any]) -> list[Any]:
        """Return the tokens that the object has afterwards."""
        return [
            Scalars({name: part for name, part in token.items() if name not in self.gone} | self.changed)
            if type(token) is Scalars
            else token
            for token in tokens
        ]

    def __bool__(self) -> bool:
        return bool(self.changed or self.gone)


def _scalars_in(tokens: list[Any]) -> Scalars:
    return next((token for token in tokens if type(token) is Scalars), Scalars())


def _array(snapshot: Snapshot, value: Any) -> None:
    snapshot.tokens += (value.shape, value.dtype.str)
    if value.nbytes > MAX_BYTES:
        _leave_out(snapshot)
    elif value.dtype.hasobject:
        _opaque(snapshot, value)
    else:
        snapshot.tokens.append(zlib.crc32(value if value.flags.c_contiguous else value.tobytes()))


def _class(snapshot: Snapshot, value: type) -> None:
    for name, part in vars(value).items():
        if name in _NO_ATTRIBUTES or (name.startswith("__") and not issubclass(type(part), types.FunctionType)):
            continue
        snapshot.tokens.append(name)
        if issubclass(type(part), (staticmethod, classmethod)):
            snapshot.add(part.__func__)
        elif issubclass(type(part), property):
            snapshot.add((part.fget, part.fset, part.fdel))
        else:
            snapshot.add(part)


def _function(snapshot: Snapshot, value: Any) -> None:
    for part in (value.__defaults__, value.__kwdefaults__, vars(value)):
        snapshot.add(part)
    for cell in value.__closure__ or ():
        snapshot.visited.add(id(cell))
        try:
            snapshot.add(cell.cell_contents)
        except ValueError:  # its variable has no value yet
            continue


def _attributes(snapshot: Snapshot, value: Any) -> None:
    _class_of(snapshot, value)
    _add_scalars(snapshot, getattr(value, "__dict__", {}).items())
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]  # noqa: SLF001 - as pickle does
        snapshot.add(getattr(value, name, None))


def _class_of(snapshot: Snapshot, value: object) -> None:
    if type(value).__module__ == "__main__":
        snapshot.add(type(value))


def _opaque(snapshot: Snapshot, value: object) -> None:
    object_id = snapshot.ids.get(value)
    if object_id in snapshot.ids.slow:
        _leave_out(snapshot)
        return
    for _ in range(2):  # the first time, libraries are imported
        began = time.perf_counter()
        checksum = Checksum(MAX_BYTES)
        try:
            _ChecksumPickler(snapshot, value, checksum).dump(value)
        except Exception:  # users' code, or there is too much of it
            break
        if time.perf_counter() - began < _MAX_SECONDS:
            snapshot.tokens.append(checksum.value)
            return
    _leave_out(snapshot)
    if object_id is not None:
        snapshot.ids.slow.add(object_id)


def _leave_out(snapshot: Snapshot) -> None:
    snapshot.tokens.append(None)
    snapshot.is_partial = True


class Checksum:
    """A file that sums up what is written to it, up to a limit in bytes."""

    def __init__(self, limit: int) -> None:
        self.value = 0
        self._left = limit

    def write(self, data: Any) -> int:
        """Take data. OverflowError: it is too much."""
        size = memoryview(data).nbytes
        self._left -= size
        if self._left < 0:
            raise OverflowError
        self.value = zlib.crc32(data, self.value)
        return size

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer that is not in the pickle."""
        self.write(buffer.raw())
        return False


class _ChecksumPickler(pickle.Pickler):
    """Takes the checksum of an object, and has the objects in it read that are read in other ways."""

    def __init__(self, snapshot: Snapshot, value: object, checksum: Checksum) -> None:
        super().__init__(checksum, protocol=5, buffer_callback=checksum.take)
        self._snapshot = snapshot
        self._value = value

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) in ATOMS or obj is self._value or not has_identity(obj):
            return None
        # The same for all, because an object that is made to be pickled has another id each time.
        return None if self._snapshot.read_later(obj) is None else 0


_APART = frozenset({_tensor, _module, _optimizer, _attributes})


def has_identity(value: object) -> bool:
    """Return whether a value is an object that others refer to, and not a container or what only its type knows."""
    return not issubclass(type(value), CONTAINERS) and _reader(type(value)) in _APART
