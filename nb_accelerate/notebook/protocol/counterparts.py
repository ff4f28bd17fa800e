"""Things of this process that have a counterpart in another one: its streams, its shell, locks that nobody holds.

Each type is named in a table, with what an object of it, or of a class derived from it, is pickled as. What has no
counterpart is refused, with what to write instead. Types are named by text: nothing is imported to look for them.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import functools
import importlib
import io
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ShippingError

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Mapping

    # Returns what ``__reduce__`` may return; ``NotImplemented`` leaves an object to pickle.
    Rule = Callable[[Any], Any]


def rule_of(kind: type, rules: Mapping[str, Rule]) -> Rule | None:
    """Return the rule for objects of a type: the rule of its nearest base class that has one."""
    rules_of_bases = (rules.get(f"{base.__module__}.{base.__qualname__}") for base in kind.__mro__)
    return next((rule for rule in rules_of_bases if rule is not None), None)


def standing(module: str, name: str) -> Any:
    """Return what an imported module has under a name, which may have dots; None if there is none."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, "__dict__", {}).get(part)
    return value


def by_name(module: str, name: str = "") -> Any:
    """Import a module, and return it, or what it has under a name. Pickles call it."""
    importlib.import_module(module)
    value: Any = sys.modules[module]
    return functools.reduce(getattr, name.split("."), value) if name else value


def plain_state(value: Any) -> tuple[Any, ...]:
    """Return what pickle reduces an object to whose class says nothing about it."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # noqa: SLF001 - as pickle does
    slots = {name: getattr(value, name) for name in names if hasattr(value, name)}
    state = getattr(value, "__dict__", None)
    return copyreg.__newobj__, (type(value),), (state, slots) if slots else state  # type: ignore[attr-defined]


# Streams and the shell.


def file_rule(value: Any) -> Any:
    """Reduce a standard stream to that of the process that unpickles it, a file that is read to its path and position.

    Raises:
        ShippingError: it is written, or is not on a disk.
    """
    for stream in ("stdout", "stderr", "stdin", "__stdout__", "__stderr__"):
        if getattr(sys, stream) is value:
            return getattr, (sys, stream.strip("_"))
    name: Any = getattr(value, "name", None)
    has_path = isinstance(name, (str, bytes))
    if has_path and not value.closed and value.readable() and not value.writable() and value.seekable():
        with contextlib.suppress(OSError):  # it is being read line by line, which hides the position
            text = (value.encoding, value.errors) if isinstance(value, io.TextIOBase) else ()
            return _read_from, (os.path.abspath(name), value.mode, value.tell(), *text)  # noqa: PTH100 - or bytes
    path = f", {name!r}," if has_path else ""
    raise ShippingError(
        f"A file object stays in its process: send its path{path} and open it where it is needed.", is_final=True
    )


def _read_from(
    path: str | bytes, mode: str, position: int, encoding: str | None = None, errors: str | None = None
) -> Any:
    file = open(path, mode, encoding=encoding, errors=errors)  # noqa: PTH123, SIM115 - the user closes it
    file.seek(position)
    return file


def _archive(archive: Any) -> Any:
    path: Any = getattr(archive, "filename", None) or archive.name  # of a zipfile, of a tarfile
    if archive.mode != "r" or path is None:
        raise ShippingError("Open the archive by its path where it is needed.", is_final=True)
    opens = ("zipfile", "ZipFile") if hasattr(archive, "filename") else ("tarfile", "open")
    return _opened_archive, (*opens, os.path.abspath(path), getattr(archive, "pwd", None))  # noqa: PTH100 - or bytes


def _opened_archive(module: str, opener: str, path: str, password: bytes | None) -> Any:
    archive = by_name(module, opener)(path)
    if password is not None:
        archive.setpassword(password)
    return archive


def _of_hdf5(value: Any) -> Any:
    file = value.file
    if file.mode != "r":
        _stays("Open it by its path, {0.filename!r}, where it is written, on one rank.", file)
    return _opened_hdf5, (os.path.abspath(file.filename), value.name)  # noqa: PTH100 - it is text


def _opened_hdf5(path: str, name: str) -> Any:
    file = by_name("h5py", "File")(path, "r")
    return file if name == "/" else file[name]


def _lmdb(environment: Any) -> Any:
    flags = environment.flags()
    if not flags["readonly"]:
        _stays("Call lmdb.open with the path where it is read: in `__getitem__`, say.", environment)
    return _opened_lmdb, (environment.path(), flags)


def _opened_lmdb(path: str, flags: dict[str, bool]) -> Any:
    return by_name("lmdb", "open")(path, **flags)


def _executor(executor: Any) -> Any:
    names = ("max_workers", "thread_name_prefix", "initializer", "initargs", "max_tasks_per_child")
    options = {name: getattr(executor, f"_{name}") for name in names if hasattr(executor, f"_{name}")}
    kind: Any = type(executor)
    return functools.partial(kind, **options), ()


def _shell(_: Any) -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython, ()


def _bar(bar: Any) -> Any:
    kind: Any = type(bar)
    names = ("iterable", "total", "leave", "unit", "unit_scale", "disable")
    options = {name: getattr(bar, name) for name in names if hasattr(bar, name)}
    desc = (getattr(bar, "desc", "") or "").removesuffix(": ")
    return functools.partial(kind, desc=desc or None, initial=bar.n, **options), ()


def _file_handler(handler: logging.FileHandler) -> Any:
    make, arguments, state = plain_state(handler)
    return make, arguments, {**state, "stream": None, "mode": "a"}  # it opens its file when it writes


# Locks, and what is made of them.


def _lock(lock: Any) -> Any:
    if repr(lock).startswith("<locked"):
        raise ShippingError("It is a lock, and held at this moment: release it before.")
    return (threading.RLock if isinstance(lock, type(threading.RLock())) else threading.Lock), ()


def _local(value: Any) -> Any:
    kind: Any = type(value)
    if hasattr(kind, "__dataclass_fields__"):  # it is made again in each thread, from these arguments
        return functools.partial(kind, **vars(value)), ()
    return copyreg.__newobj__, (kind,), vars(value)  # type: ignore[attr-defined]


def _referring(kind: Any, target: Any) -> Any:
    return kind(set() if target is None else target)  # the set is gone at once, as what was referred to is


# Libraries of C, context managers, functions that remember.


def _library(library: ctypes.CDLL) -> Any:
    # Pickled as any object, it would have the handle of this process, and end the other one by SIGSEGV.
    functions = {name: part for name, part in vars(library).items() if isinstance(part, ctypes._CFuncPtr)}  # type: ignore[attr-defined] # noqa: SLF001
    signatures = {name: (part.restype, part.argtypes) for name, part in functions.items()}
    return _opened, (type(library), library._name, signatures)  # noqa: SLF001 - it has no other name


def _opened(kind: type[ctypes.CDLL], name: str | None, signatures: dict[str, tuple[Any, Any]]) -> ctypes.CDLL:
    library = kind(name)
    for function, (result, arguments) in signatures.items():
        pointer = getattr(library, function)
        pointer.restype, pointer.argtypes = result, arguments
    return library


def _of_library(function: Any) -> Any:
    library = (function._objects or {}).get("0")  # noqa: SLF001 - nothing else says it
    if not isinstance(library, ctypes.CDLL):
        return NotImplemented
    setattr(library, function.__name__, function)  # so that the library tells what it takes and returns
    return getattr, (library, function.__name__)


def _vectorized(function: Any) -> Any:
    make, arguments, state = plain_state(function)
    return make, arguments, {**state, "_ufunc": {}}  # they are made again


def _context(manager: Any) -> Any:
    if "func" not in vars(manager):
        raise ShippingError("Its `with` block has begun: make another one where it is needed.")
    return type(manager), (manager.func, manager.args, manager.kwds)


def remembering(function: Any) -> Any:
    """Reduce a function that keeps its results, to one that has kept none."""
    return functools.lru_cache(**function.cache_parameters()), (function.__wrapped__,)


# torch.


def _operator(operator: Any) -> Any:
    overload = getattr(operator, "_overloadname", "")
    name = operator._name.partition(".")[0] if overload else operator._qualified_op_name  # noqa: SLF001
    return by_name, ("torch", ".".join(filter(None, ["ops", *name.split("::"), overload])))


def _custom_op(op: Any) -> Any:
    if {*op._backend_fns} != {None}:  # noqa: SLF001 - torch has no other way to read them
        raise ShippingError("It has kernels for some devices: define it in the function or cell that the ranks run.")
    definition = op._qualname, op._init_fn, op._schema  # noqa: SLF001
    return _defined_op, (*definition, op._abstract_fn, op._backward_fn, op._setup_context_fn)  # noqa: SLF001


def _defined_op(name: str, function: Any, schema: str, fake: Any, backward: Any, setup_context: Any) -> Any:
    import torch

    op = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
    if fake is not None:
        op.register_fake(fake)
    if backward is not None:
        op.register_autograd(backward, setup_context=setup_context)
    return op


def _loader(loader: Any) -> Any:
    if vars(loader).get("_iterator") is None:
        return NotImplemented
    make, arguments, state, *rest = loader.__reduce_ex__(5)
    return make, arguments, {**state, "_iterator": None}, *rest


def _script(scripted: Any) -> Any:
    import torch

    schema = getattr(scripted, "schema", None)
    if schema is not None and any(argument.has_default_value() for argument in schema.arguments):
        original = getattr(scripted, "_torchdynamo_inline", None)
        if original is None:
            raise ShippingError(
                "A saved scripted function forgets its defaults: call torch.jit.script where it is needed."
            )
        return torch.jit.script, (original,)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    return _scripted, (buffer.getvalue(),)


def _scripted(content: bytes) -> Any:
    import torch

    return torch.jit.load(io.BytesIO(content), map_location="cpu")  # type: ignore[no-untyped-call]


# What has no counterpart.


def _stays(sentence: str, value: Any) -> Any:
    raise ShippingError(sentence.format(value), is_final=True)


# What to write, by type. A fork would not help: threads stay here, and connections and positions would be shared.
_STAY = {
    "torch.utils.tensorboard.writer.SummaryWriter": "It writes by a thread of this process: make the writer inside the "
    "function that the ranks run.",
    "wandb.sdk.wandb_run.Run": "It is connected by this process: call wandb.init inside the function that the ranks "
    "run, on rank 0.",
    "builtins.Transaction": "Begin it where it is read: in `__getitem__`, say.",  # of lmdb
    "sqlite3.Connection": "Call sqlite3.connect with the path of its file where it is read.",
}


def _widget(_: Any) -> Any:
    raise ShippingError("The notebook shows it. Ranks have bars of tqdm, which their panel shows.")


# What is read from a file by a library is opened by its path; what is written stays.
_OPENED: dict[str, Rule] = {
    **dict.fromkeys(("zipfile.ZipFile", "tarfile.TarFile"), _archive),
    **dict.fromkeys(("h5py._hl.files.File", "h5py._hl.group.Group", "h5py._hl.dataset.Dataset"), _of_hdf5),
    "builtins.Environment": _lmdb,
}


def stays(value: object) -> bool:
    """Return whether an object has no counterpart because of its type or of how it was opened, and not of a part."""
    return any(f"{base.__module__}.{base.__qualname__}" in {*_STAY, *_OPENED} for base in type(value).__mro__)


RULES: dict[str, Rule] = {
    **{name: functools.partial(_stays, sentence) for name, sentence in _STAY.items()},
    **_OPENED,
    **dict.fromkeys(
        ("concurrent.futures.thread.ThreadPoolExecutor", "concurrent.futures.process.ProcessPoolExecutor"), _executor
    ),
    "ipywidgets.widgets.widget.Widget": _widget,
    "tqdm.std.tqdm": _bar,
    "logging.FileHandler": _file_handler,
    "ipykernel.iostream.OutStream": lambda stream: (getattr, (sys, stream.name)),
    "IPython.core.interactiveshell.InteractiveShell": _shell,
    "_thread.lock": _lock,
    "_thread.RLock": _lock,
    "_thread._local": _local,
    "_queue.SimpleQueue": lambda queue: (type(queue), ()) if queue.empty() else NotImplemented,
    "weakref.ReferenceType": lambda value: (_referring, (type(value), value())),
    **dict.fromkeys(
        ("weakref.WeakKeyDictionary", "weakref.WeakValueDictionary"), lambda value: (type(value), (dict(value),))
    ),
    "ctypes.CDLL": _library,
    "_ctypes.CFuncPtr": _of_library,
    "numpy.vectorize": _vectorized,
    "contextlib._GeneratorContextManager": _context,
    "torch._ops.OpOverload": _operator,
    "torch._ops.OpOverloadPacket": _operator,
    "torch._library.custom_ops.CustomOpDef": _custom_op,
    "torch.utils.data.dataloader.DataLoader": _loader,
    "torch.jit.torch.jit.ScriptFunction": _script,
    "torch.jit._script.ScriptModule": _script,
}
