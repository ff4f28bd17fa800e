"""Import public names when they are first used, from the table that the stub of a package is.

A package lists them once, in the ``__init__.pyi`` beside its ``__init__.py``, which type checkers and editors read too
(`SPEC 1 <https://scientific-python.org/specs/spec-0001/>`_ of Scientific Python).
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def attach(package: str, *, advice: str = "") -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package. Advice is added to errors for names that it lacks."""

    def get(name: str) -> Any:
        if name == "__all__":
            return public_names(package)
        home = table(package).get(name)
        if home is None:
            raise _unknown(package, name, advice)
        module, attribute = home
        try:
            imported = importlib.import_module(module)
            value = getattr(imported, attribute) if attribute else imported
        except ImportError as error:
            from nb_accelerate.base.config.versions import check_versions
            from nb_accelerate.errors import MissingDependencyError

            check_versions()  # an older package may lack what was to be imported
            if not isinstance(error, ModuleNotFoundError) or (error.name or "").partition(".")[0] != "torch":
                raise
            raise MissingDependencyError("torch", needed_for=f"{package}.{name}") from error
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *table(package)})

    return get, listed


def _unknown(package: str, name: str, advice: str) -> AttributeError:
    from nb_accelerate.base.config.checks import suggest  # when a name is asked for, as above
    from nb_accelerate.errors.traceback_lines import short_lines, show_instead

    # Names such as __path__ are what Python and its tools look for.
    hint = "" if name.startswith("__") else suggest(name, public_names(package))
    # With an object given, newer versions of Python add no suggestion of their own.
    text = f"module {package!r} has no attribute {name!r}{advice}" + (f".{hint}" if hint else "")
    error = AttributeError(text, obj=None)
    show_instead(error, functools.partial(short_lines, error))
    return error


def public_names(package: str) -> list[str]:
    """Return the names that ``from package import *`` imports, sorted: those of the table without the submodules."""
    return sorted(name for name, (_, attribute) in table(package).items() if attribute)


@functools.cache
def table(package: str) -> dict[str, tuple[str, str]]:
    """Return for each name of a package its module, and its name there; ``""`` there for a module itself."""
    return _read(package, "__init__.pyi")


def _read(package: str, file: str) -> dict[str, tuple[str, str]]:
    """Return the table that imports and constants of a file make; ``import *`` stands for those of a file beside it."""
    import ast  # when a name is asked for: importing a package needs neither
    import pkgutil

    places: dict[str, tuple[str, str]] = {}
    for node in ast.parse(pkgutil.get_data(package, file) or b"", file).body:
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            places |= {name: (f"{package}.{file.partition('.')[0]}", name) for name in names if name[0] != "_"}
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        for alias in node.names:
            if alias.name == "*":
                places |= _read(package, f"{node.module.rpartition('.')[2]}.py")
            elif alias.asname is not None:  # `as` says that the name is public
                is_module = node.module == package
                places[alias.asname] = (f"{package}.{alias.name}", "") if is_module else (node.module, alias.name)
    return places
