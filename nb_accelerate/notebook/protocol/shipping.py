"""Pickle functions, arguments and results for another process.

`pack` pickles by value what was defined in a notebook (cloudpickle), and does not copy large buffers, those of NumPy
arrays and of torch's CPU storages, into the pickle. Small parcels are part of their message. Large ones are written
once into an anonymous memory file, a segment, whose descriptor is sent with the message. Every receiver maps it
privately: a 1 GB tensor is copied once for any number of ranks, nothing gets a name in ``/dev/shm``, and the memory is
freed when the last process ends.

Tensors on an accelerator arrive on the CPU: unpickling must not touch a device in a kernel that may still fork.

What a receiver has already travels as a reference to it, so that it stays one object there: `References` gives its id
to the pickle, and `unpack_with_ids` finds the object of an id. Both sides know new objects by the same ids because a
pickle counts the objects in it, in the same order when it is written and when it is read.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import itertools
import mmap
import os
import pickle
import sys
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import cloudpickle

from nb_accelerate.base.imported import imported
from nb_accelerate.errors import ShippingError, TooLargeError
from nb_accelerate.notebook.protocol.anonymous_file import anonymous_file
from nb_accelerate.notebook.protocol.content import Checksum, attributes_of_optimizer, has_identity
from nb_accelerate.notebook.protocol.explain import find_unpicklable
from nb_accelerate.notebook.protocol.interrupts import interrupts_later
from nb_accelerate.notebook.protocol.main_module import REDUCERS, Globals, MainPickler
from nb_accelerate.notebook.protocol.messages import Parcel
from nb_accelerate.notebook.protocol.renewal import is_of_torch, pickled_by_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence
    from types import ModuleType

    from nb_accelerate.notebook.protocol.content import ObjectIds

# Bytes of a pickle that is part of its message, at most: sending to a busy rank must not fill the socket's buffer.
_INLINE_LIMIT = 1 << 15

_SMALL_BUFFER = 1 << 10  # bytes of a buffer that is copied into the pickle, at most: that is cheaper than a segment
_ALIGNMENT = 64  # bytes to which buffers in a segment are aligned, as torch aligns its own CPU storages


# What errors about values that ranks send to the notebook advise.
RETURNABLE = "what can be pickled: numbers, text, arrays, tensors, a model's state_dict()"


@dataclass
class References:
    """What the receivers have already."""

    object_ids: ObjectIds
    known: Container[int | str]
    # Variables of the receivers that hold a list or dictionary, by its address here.
    names: Mapping[int, str] = field(default_factory=dict)
    # Those of `known` and `names` that were referred to, when it was packed.
    used: set[int | str] = field(default_factory=set)
    packed: dict[int, Any] = field(default_factory=dict)


class Packed:
    """A pickled object, to be sent to any number of receivers. Close it when it was sent to all.

    Attributes:
        names, codes: of the `MainPickler` that has pickled it.
    """

    def __init__(self, pickled: bytes, buffers: list[pickle.PickleBuffer], pickler: MainPickler) -> None:
        self.names = frozenset(pickler.names)
        self.codes = tuple(pickler.codes)
        self._segment: io.FileIO | None = None  # closes itself, once, wherever an interrupt comes
        if len(pickled) <= _INLINE_LIMIT and not buffers:
            self.parcel = Parcel(pickled=pickled)
            return
        parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
        self.parcel = Parcel(sizes=tuple(part.nbytes for part in parts))
        self._segment = write_segment(parts)

    @property
    def fds(self) -> tuple[int, ...]:
        return () if self._segment is None or self._segment.closed else (self._segment.fileno(),)

    def close(self) -> None:
        """Close the segment; receivers have descriptors of their own."""
        if self._segment is not None:
            self._segment.close()

    def __enter__(self) -> Packed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pack(
    value: object,
    *,
    name: str = "value",
    parts: Mapping[str, object] | None = None,
    advice: str = "",
    by_value: Sequence[ModuleType] = (),
    globals_there: Globals = Globals.OWN,
    limit: int | None = None,
    references: References | None = None,
    refuses_graphs: bool = False,
) -> Packed:
    """Pickle an object.

    Args:
        value: anything. Functions and classes of ``__main__`` are pickled by value.
        parts: what it is made of that has names of its own, by what to call these in an error.
        advice: a sentence for the error: what to write instead of a part that cannot be pickled.
        by_value: modules whose functions and classes are pickled by value too, as they are in memory here. Those of all
            other modules are imported where they are unpickled.
        references: what the receivers have. They call `unpack_with_ids`, and not `unpack`.
        refuses_graphs: a tensor that was computed from others that need gradients is an error. It would arrive without
            them, and `backward` would not reach them.

    Raises:
        ShippingError: some part of it cannot be pickled; the error names the part and where it sits.
    """
    buffers: list[pickle.PickleBuffer] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes <= _SMALL_BUFFER:
            return True
        buffers.append(buffer)
        return False

    file = io.BytesIO()
    with _pickled_by_value(by_value):
        try:
            make = ValuePickler if references is None else functools.partial(_ReferringPickler, references)
            pickler = make(file, protocol=5, buffer_callback=stays_inside, globals_there=globals_there)
            pickler.refuses_graphs = refuses_graphs
            pickler.dump(value)
            if references is not None:
                _write_ids(pickler, references, file)
        except (Exception, SystemExit) as error:  # __reduce__ and __getstate__ are users' code
            dumps = functools.partial(_dumps, refuses_graphs=refuses_graphs)
            raise _why_not(value, name, parts or {}, advice, error, dumps) from error
    size = file.tell() + sum(buffer.raw().nbytes for buffer in buffers)
    if limit is not None and size > limit:
        raise TooLargeError(f"{name} has {size / 2**30:.1f} GiB", size=size)
    return Packed(file.getvalue(), buffers, pickler)


@contextlib.contextmanager
def _pickled_by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    with contextlib.ExitStack() as registered:
        for module in modules:
            if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                registered.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _write_ids(pickler: ValuePickler, references: References, file: IO[bytes]) -> None:
    """Write the ids of the objects in a pickle behind it, by their index in the memo, which unpickling has too."""
    object_ids = {}
    for index, part in pickler.memo.copy().values():
        object_id = references.object_ids.assign(part) if has_identity(part) else references.object_ids.get(part)
        if object_id is not None:
            object_ids[index] = object_id
            references.packed[object_id] = part
    pickle.dump(object_ids, file)


def _why_not(
    value: object,
    name: str,
    parts: Mapping[str, object],
    advice: str,
    error: BaseException,
    dumps: Callable[[object], bytes],
) -> ShippingError:
    path, culprit, reason, own = find_unpicklable(value, name, parts, error, dumps)
    if isinstance(own, _HasGraphError):
        line = f"{path} = {path}.detach()" if path.isidentifier() else "its .detach() there, as in x = x.detach()"
        text = f"{path} cannot be sent to another process: {own}. Write {line}"
        return ShippingError(text, path=path, is_final=True)
    if own is not None:
        return ShippingError(f"{path} cannot be sent to another process. {own}", path=path, is_final=own.is_final)
    text = f"{path} cannot be sent to another process: {culprit} cannot be pickled ({reason}). {advice}"
    return ShippingError(text.rstrip(), path=path)


def unpack(parcel: Parcel, fds: tuple[int, ...] = ()) -> Any:
    """Return the object in a parcel, whose descriptors are taken over. Raises what unpickling it raises."""
    stream, buffers = _opened(parcel, fds)
    try:
        return pickle.loads(stream, buffers=buffers)
    except Exception as error:
        _note_variable(error, stream, buffers)
        raise


def unpack_with_ids(
    parcel: Parcel, fds: tuple[int, ...], find: Callable[[int | str], Any]
) -> tuple[Any, dict[int, Any]]:
    """Return the object in a parcel that was packed with references, and the objects in it by their ids.

    Args:
        find: returns what this process has, by its id or by the name of a variable.
    """
    stream, buffers = _opened(parcel, fds)
    file = io.BytesIO(stream)
    unpickler = _ReferringUnpickler(file, buffers=buffers)
    unpickler.persistent_load = find
    try:
        value = unpickler.load()
    except Exception as error:
        _note_variable(error, stream, buffers, find)
        raise
    memo = unpickler.memo.copy()
    return value, {object_id: memo[index] for index, object_id in pickle.load(file).items()}


def _note_variable(
    error: Exception,
    stream: bytes | memoryview,
    buffers: list[memoryview],
    find: Callable[[int | str], Any] | None = None,
) -> None:
    """Note in an error of unpickling which variable of the notebook it was, as far as the stack of the pickle shows."""
    # The one of C keeps its stack to itself.
    unpickler: Any = pickle._Unpickler(io.BytesIO(stream), buffers=buffers)  # noqa: SLF001
    if find is not None:
        unpickler.persistent_load = find
    with contextlib.suppress(BaseException):
        unpickler.load()
    # A dictionary that is being filled stands below its keys and values. The globals of the innermost function have the
    # variable; or, with a cell, the outermost dictionary.
    levels = [*getattr(unpickler, "metastack", ()), getattr(unpickler, "stack", [])]
    name, is_globals = "", find is not None
    for below, level in itertools.pairwise(levels):
        keys = [key for key in level[::2] if isinstance(key, str)]
        if not (below and type(below[-1]) is dict and keys):
            continue
        if is_globals:
            name = keys[-1]
        is_globals = keys[-1] == "__globals__"
    if name.isidentifier():
        with contextlib.suppress(Exception):  # a class that takes no attributes
            vars(error).setdefault("__notes__", []).append(f"The variable {name!r} could not be read.")


@contextlib.contextmanager
def closed_on_error(fds: tuple[int, ...]) -> Iterator[None]:
    """Close descriptors that nobody has taken over yet, if the block fails."""
    try:
        yield
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _opened(parcel: Parcel, fds: tuple[int, ...]) -> tuple[bytes | memoryview, list[memoryview]]:
    if not parcel.sizes:
        return parcel.pickled, []
    (fd,) = fds
    try:
        # Private: a rank that writes into its argument changes neither another rank's nor the notebook's.
        view = memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(fd)
    parts, offset = [], 0
    for size in parcel.sizes:
        parts.append(view[offset : offset + size])
        offset = _aligned(offset + size)
    return parts[0], parts[1:]


def _dumps(value: object, *, refuses_graphs: bool) -> bytes:
    file = io.BytesIO()
    pickler = ValuePickler(file, protocol=5, buffer_callback=lambda _: None)
    pickler.refuses_graphs = refuses_graphs
    pickler.dump(value)
    return file.getvalue()


class _HasGraphError(ShippingError):
    """A tensor was computed from others that need gradients."""


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def write_segment(parts: list[memoryview]) -> io.FileIO:
    """Return an anonymous file with these bytes, each part at a multiple of `_ALIGNMENT`. Close it."""
    with interrupts_later():
        file = io.FileIO(anonymous_file(), "r+")
    try:
        offset = 0
        for part in parts:
            rest = part.cast("B")
            while rest:
                written = os.pwrite(file.fileno(), rest, offset)
                rest, offset = rest[written:], offset + written
            offset = _aligned(offset)
        file.truncate(max(offset, 1))
    except BaseException:
        file.close()
        raise
    return file


class ValuePickler(MainPickler):
    """cloudpickle, with the memory of torch storages out of band.

    ``Tensor.__reduce_ex__`` hands out a `TypedStorage`, whose own pickling copies three times and forgets that two
    views share memory. Pickling the untyped storage once, as a buffer, keeps the sharing and copies nothing.
    """

    dispatch_table = REDUCERS
    refuses_graphs = False

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self._computed_anew: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        """Reduce what torch or this package pickles otherwise; see `MainPickler`."""
        torch = imported("torch")
        if self.refuses_graphs and is_of_torch(obj, "nn.Module") and obj._forward_pre_hooks:  # noqa: SLF001
            # Such hooks compute a weight before each call: those of `weight_norm` and `prune`, say.
            self._computed_anew.update(map(id, vars(obj).values()))
        has_graph = self.refuses_graphs and is_of_torch(obj, "Tensor") and obj.requires_grad and not obj.is_leaf
        if has_graph and id(obj) not in self._computed_anew:
            raise _HasGraphError("it was computed from tensors that need gradients, which stay in this process")
        # Half-imported while another thread imports it: then nobody can have a storage yet.
        storage_module = getattr(torch, "storage", None)
        if torch is not None and storage_module is not None:
            if type(obj) is storage_module.TypedStorage:
                return _typed_storage, (obj._untyped_storage, obj.dtype)  # noqa: SLF001 - there is no public way
            if type(obj) is torch.UntypedStorage:
                on_cpu = obj.cpu()
                if on_cpu.nbytes() == 0:
                    return torch.UntypedStorage, (0,)
                array = torch.empty(0, dtype=torch.uint8, device="cpu").set_(on_cpu).numpy()
                return _untyped_storage, (pickle.PickleBuffer(array),)
        if is_of_torch(obj, "nn.Parameter") and any(getattr(obj, of) for of in _HOOKS):
            hooks = [(name, list((getattr(obj, of) or {}).values())) for of, name in _HOOKS.items()]
            return (*obj.__reduce_ex__(5)[:2], hooks, None, None, _register)
        if pickled_by_torch(obj):
            called = {name: part for name, part in vars(obj).items() if name.endswith("_hooks") and part}
            return copyreg.__newobj__, (type(obj),), attributes_of_optimizer(obj) | called  # type: ignore[attr-defined]
        return super().reducer_override(obj)


class _ComparingPickler(ValuePickler):
    """Writes the same for equal objects in every process."""

    def persistent_id(self, obj: Any) -> str | None:
        # cloudpickle gives each class of a notebook a random number.
        return obj.__qualname__ if issubclass(type(obj), type) else None


def checksum(value: object) -> int | None:
    """Return a number that is the same for equal objects of several processes; None for what cannot be pickled."""
    file = Checksum(sys.maxsize)
    try:
        _ComparingPickler(file, protocol=5, buffer_callback=file.take).dump(value)
    except Exception:  # of users' code, too
        return None
    return file.value


class _ReferringPickler(ValuePickler):
    """Refers to what the receivers have."""

    def __init__(self, references: References, file: IO[bytes], **options: Any) -> None:
        super().__init__(file, **options)
        self._references = references

    def persistent_id(self, obj: Any) -> int | str | None:
        references = self._references
        key: int | str | None = references.object_ids.get(obj)
        if key is None:
            key = references.names.get(id(obj))
        elif key not in references.known:
            return None
        if key is not None:
            references.used.add(key)
        return key


class _ReferringUnpickler(pickle.Unpickler):
    persistent_load: Callable[[int | str], Any]


# Hooks of gradients, which torch leaves out of the pickle of a parameter.
_HOOKS = {"_backward_hooks": "register_hook", "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook"}


def _register(parameter: Any, hooks: list[tuple[str, list[Any]]]) -> None:
    for name, each in hooks:
        for hook in each:
            getattr(parameter, name)(hook)


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _untyped_storage(buffer: Any) -> Any:
    import torch

    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
