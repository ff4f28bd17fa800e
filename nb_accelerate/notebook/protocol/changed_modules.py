"""What the notebook has changed in modules: ranks import them as they are in their files.

Two things tell of it, and neither is a list of libraries:

- the text of the notebook: attributes of modules that it assigns to (``mycfg.LR = 3``, ``torch.load = partial(...)``,
  ``nn.Dropout.forward = mine``), in whichever function. Their values are those they have now;
- the files of modules of the user's: variables and attributes of classes for which a file has a literal, and that have
  another value now; and what the notebook has defined in dictionaries and lists of them, as registries have it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import linecache
import logging
import operator
import re
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nb_accelerate.base.imported import imported
from nb_accelerate.base.ipython_versions import lines_of_cell
from nb_accelerate.errors.traceback_lines import is_users
from nb_accelerate.notebook.protocol.settings import Part, is_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

logger = logging.getLogger("nb_accelerate")

_BEGAN = time.time()

# Packages whose state belongs to each rank: streams, environment, shell.
_NOT_FOLLOWED = ("sys", "os", "__main__", "nb_accelerate", "IPython", "ipykernel")

_MANY = 1000  # entries of a dictionary or list that is still read before each cell


class _Literals(NamedTuple):
    """Attributes of a module or class for which its file has a literal."""

    holder: Any
    path: str
    names: tuple[str, ...]
    values: tuple[Any, ...]


class _UserModule(NamedTuple):
    spec: Any  # another one after importlib.reload
    literals: list[_Literals]


class _Notebook:
    """What is known of the notebook's text and of the modules that are imported here."""

    def __init__(self) -> None:
        self.read_files: set[str] = set()
        self.aliases: dict[str, str] = {}
        self.assigned: set[str] = set()
        self.told_names: set[str] = set()
        self.readers: dict[tuple[str, str], Callable[[Any], Any]] = {}
        self.num_modules = 0
        self.seen_modules: set[str] = set()
        self.user_modules: dict[str, _UserModule] = {}


_notebook = _Notebook()


def not_of_notebook(filename: str) -> None:
    """Note that a text is of a cell of the ranks: it assigns there, and not here."""
    _notebook.read_files.add(filename)


def changed_here() -> dict[tuple[str, str], Any]:
    """Return what was changed in modules, by module and path of the attribute."""
    changes: dict[tuple[str, str], Any] = {}
    _read_texts()
    for (module, path), read in _notebook.readers.items():
        with contextlib.suppress(Exception):  # the line that assigns it has not run, or a property fails
            value = read(imported(module))
            changes[module, path] = value.copy() if type(value) in (dict, list, set) else value
    for module_name, user_module in _user_modules().items():
        if imported(module_name) is not None:
            literal_changes = _changes(imported(module_name), user_module.literals)
            changes.update(((module_name, path), value) for path, value in literal_changes)
    for key in changes.keys() - _notebook.readers.keys():  # sent from now on, also when it is as in the file again
        _notebook.readers[key] = operator.attrgetter(key[1])
    return changes


def reloaded_here() -> list[str]:
    """Return the modules of the user's that were reloaded since this was called."""
    reloaded = [
        name
        for name, user_module in _user_modules().items()
        if imported(name) is not None and imported(name).__spec__ is not user_module.spec
    ]
    for name in reloaded:
        module = imported(name)
        _notebook.user_modules[name] = _UserModule(module.__spec__, list(_literals(module)))
    return reloaded


# The text of the notebook.

_OF_INTEREST = re.compile(r"\bimport\b|\w\.\w+\s*=(?!=)|\bsetattr\b|\bsys\.|\.register\b|\.library\.")

# Calls, and assignments to entries, that change a process in a way that cannot be read from it.
_STAYS_HERE = re.compile(
    r"codecs\.register|sys\.(meta_path|path_hooks)\.(append|insert)|sys\.modules\[\]"
    r"|torch\.library\.(define|impl|Library|register_\w+)"
)


def _read_texts() -> None:
    for filename in [name for name in [*linecache.cache] if name not in _notebook.read_files]:
        _notebook.read_files.add(filename)
        text = "".join(lines_of_cell(filename) or ())
        if _OF_INTEREST.search(text):
            with contextlib.suppress(SyntaxError, ValueError):
                _read_text(ast.parse(text))
    for dotted in list(_notebook.assigned):
        key = _resolved(dotted)
        if key is not None:
            _notebook.assigned.discard(dotted)
            _notebook.readers[key] = operator.attrgetter(key[1])


def _read_text(tree: ast.Module) -> None:
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                _notebook.aliases[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                _notebook.aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes:
        target: Any = node
        name: Any = None
        is_entry = False
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            target, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) > 1:
            target, name = node.args[0], getattr(node.args[1], "value", None)
        elif isinstance(node, ast.Call):
            target = node.func
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            target, is_entry = node.value, True
        else:
            continue
        parts: list[str] = []
        while isinstance(target, ast.Attribute):
            parts.insert(0, target.attr)
            target = target.value
        base = _notebook.aliases.get(target.id) if isinstance(target, ast.Name) else None
        if base is None:
            continue
        dotted = ".".join([base, *parts])
        if isinstance(name, str):
            if base.partition(".")[0] not in _NOT_FOLLOWED:
                _notebook.assigned.add(f"{dotted}.{name}")
        else:
            _tell_if_it_stays(f"{dotted}[]" if is_entry else dotted)


def _tell_if_it_stays(dotted: str) -> None:
    stays = _STAYS_HERE.fullmatch(dotted) is not None
    attribute = _resolved(dotted) if dotted.endswith(".register") else None
    if attribute is not None:
        module, path = attribute
        function: Any = imported(module)
        for part in path.split(".")[:-1]:
            function = getattr(function, part, None)
        stays = stays or hasattr(function, "dispatch")  # of `functools.singledispatch`
    if stays and dotted not in _notebook.told_names:
        _notebook.told_names.add(dotted)
        logger.warning(
            "%s of this notebook does not reach ranks. Write it in the function or cell that they run too.",
            dotted.replace("[]", "[...]"),
        )


def _resolved(dotted: str) -> tuple[str, str] | None:
    """Return the module that is imported, or the class, that has the attribute, and its path from there."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = imported(".".join(parts[:end]))
        if module is None:
            continue
        holder: Any = module
        for part in parts[end:-1]:
            holder = getattr(holder, part, None)
        if isinstance(holder, type) and imported(holder.__module__) is not None:
            return holder.__module__, f"{holder.__qualname__}.{parts[-1]}"
        if isinstance(holder, type(sys)):
            return holder.__name__, parts[-1]
        return ".".join(parts[:end]), ".".join(parts[end:])
    return None


# Modules of the user's.


def _user_modules() -> dict[str, _UserModule]:
    if len(sys.modules) != _notebook.num_modules:
        _notebook.num_modules = len(sys.modules)
        for name, module in list(sys.modules.items()):
            if name in _notebook.seen_modules:
                continue
            _notebook.seen_modules.add(name)
            file = getattr(module, "__file__", None)
            spec = getattr(module, "__spec__", None)  # torch.ops has none, and its `__file__` names no file
            is_main = name in ("__main__", "__mp_main__")
            if spec is not None and isinstance(file, str) and not is_main and is_users(file):
                _notebook.user_modules[name] = _UserModule(spec, list(_literals(module)))
    return _notebook.user_modules


def _literals(module: ModuleType) -> Iterator[_Literals]:
    file = Path(str(module.__file__))
    try:
        if file.suffix == ".py" and _is_as_imported(module, file):
            yield from _literals_of(ast.parse(file.read_bytes()), module, "")
    except (OSError, SyntaxError, ValueError):
        return


def _is_as_imported(module: ModuleType, file: Path) -> bool:
    """Return whether a file has not been edited since it was imported."""
    stat = file.stat()
    cached = getattr(module, "__cached__", None) or importlib.util.cache_from_source(str(file))
    try:
        with io.open_code(cached) as stream:
            flags, modified, size = struct.unpack("<4xIII", stream.read(16))
    except (OSError, struct.error):
        return stat.st_mtime < _BEGAN
    return not flags and modified == int(stat.st_mtime) & 0xFFFFFFFF and size == stat.st_size & 0xFFFFFFFF


def _literals_of(scope: ast.Module | ast.ClassDef, holder: Any, path: str) -> Iterator[_Literals]:
    literals: dict[str, Any] = {}
    rebound = {name for node in ast.walk(scope) if isinstance(node, ast.Global) for name in node.names}
    for node in scope.body:
        if isinstance(node, ast.ClassDef):
            inner = vars(holder).get(node.name)
            if isinstance(inner, type) and inner.__module__ == getattr(holder, "__name__", ""):
                yield from _literals_of(node, inner, f"{path}{node.name}.")
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = {
            part.id for target in targets if target is not None for part in ast.walk(target) if hasattr(part, "id")
        }
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and len(names) == 1:
            (name,) = names
            with contextlib.suppress(ValueError):
                value = ast.literal_eval(node.value)
                if name not in literals:
                    literals[name] = value
                    continue
        # A name that a loop, a branch, a second assignment or a function with "global" binds need not have its literal.
        rebound |= {
            part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        }
    kept = {name: value for name, value in literals.items() if name not in rebound and not name.startswith("__")}
    yield _Literals(holder, path, tuple(kept), tuple(kept.values()))


def _changes(module: ModuleType, literals: list[_Literals]) -> Iterator[tuple[str, Any]]:
    literal_names = set[str]()
    for holder, path, names, values in literals:
        attributes = vars(holder)
        if not path:
            literal_names.update(names)
        current = tuple(map(attributes.get, names))
        try:
            if current == values:
                continue
        except Exception:  # noqa: S110 - arrays, and users' classes, have no truth: then each is looked at
            pass
        for name, value, literal in zip(names, current, values, strict=True):
            if name in attributes and not is_same(value, literal):
                if _is_plain(value) or _is_of_notebook(value):
                    yield path + name, value.copy() if type(value) in (dict, list, set) else value
                elif (part := _of_notebook(value)) is not None:
                    yield path + name, part
    for name, value in list(vars(module).items()):
        if name in literal_names or name.startswith("__"):
            continue
        if type(value).__module__ in _notebook.user_modules:  # a registry, with its dictionaries
            parts = [(f"{name}.{part}", inner) for part, inner in list(getattr(value, "__dict__", {}).items())]
        else:
            parts = [(name, value)]
        for path, part in parts:
            if (of_notebook := _of_notebook(part)) is not None:
                yield path, of_notebook


def _is_of_notebook(value: Any) -> bool:
    return getattr(value, "__module__", None) == "__main__"


def _of_notebook(value: Any) -> Part | None:
    """Return the entries of a dictionary or list that the notebook has defined, or None."""
    # What modules define gets into a registry as they are imported, and a second time would be refused there.
    entries: dict[Any, Any] | list[Any] = {}
    if isinstance(value, dict) and len(value) <= _MANY:
        entries = {key: entry for key, entry in list(value.items()) if _is_of_notebook(entry)}
    elif isinstance(value, list) and len(value) <= _MANY:
        entries = [entry for entry in list(value) if _is_of_notebook(entry)]
    return Part(entries) if entries else None


def _is_plain(value: Any) -> bool:
    if type(value) in (dict, list, tuple, set, frozenset):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return len(value) <= _MANY and all(map(_is_plain, parts))
    return type(value) in (int, float, bool, str, bytes, complex, type(None))
