"""Look at a module that this process may have imported, without importing it; or do something once it is imported."""

from __future__ import annotations

import importlib.abc
import sys
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec


def imported(name: str) -> Any:
    """Return a module; None if nobody has imported it yet.

    While another thread imports it, attributes of it may be missing.
    """
    return sys.modules.get(name)


_waiting: dict[str, list[Callable[[Any], object]]] = {}


def when_imported(name: str, then: Callable[[Any], object]) -> None:
    """Call a function with a module: now if it is imported, else when it has been executed."""
    module = imported(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        then(module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    waiting = _waiting.setdefault(name, [])
    if then not in waiting:
        waiting.append(then)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module as the other finders do, and has it looked at when it has been executed."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "__dict__"):  # no loader of this spec's own
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            for then in _waiting.pop(fullname, ()):
                then(sys.modules.get(fullname, module))  # some put another object in their place

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
