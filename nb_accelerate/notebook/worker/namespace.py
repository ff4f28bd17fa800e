"""Read and change the variables of a rank. The kernel sends each of these functions in a `Call`."""

from __future__ import annotations

import builtins
import difflib
import importlib
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.core.getipython import get_ipython

from nb_accelerate.notebook.protocol.main_module import main_globals
from nb_accelerate.notebook.protocol.shipping import checksum

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_HIDDEN = re.compile(
    r"_+|_i+|_i?\d+|_[iod]h|__(name|doc|package|loader|spec|builtins?|file|(conditional_)?annotations|session)__|open"
)


def is_hidden(name: str) -> bool:
    """Return whether a name is one that IPython or Python keep in a namespace for themselves."""
    # `open` is one: IPython has its own.
    return _HIDDEN.fullmatch(name) is not None


def reload(modules: tuple[str, ...]) -> None:
    """Reload modules from their files, which may have been edited since they were imported here."""
    importlib.invalidate_caches()
    for name in modules:
        if name in sys.modules:
            importlib.reload(sys.modules[name])


class MissingName(NamedTuple):
    """A name that a rank was asked for and does not have, and one that it has and that is spelled nearly so."""

    name: str
    near: str | None


def pull(names: tuple[str, ...]) -> list[Any] | MissingName:
    """Return the values of names, or the first name that is not there."""
    variables = main_globals()
    for name in names:
        if name not in variables:
            near = difflib.get_close_matches(name, [defined for defined in variables if not is_hidden(defined)], n=1)
            return MissingName(name, near[0] if near else None)
    return [variables[name] for name in names]


def checksums(names: tuple[str, ...]) -> list[int | None]:
    """Return a number for the value of each name, which is the same on ranks with equal values."""
    variables = main_globals()
    return [checksum(variables[name]) if name in variables else None for name in names]


def reset(kept: tuple[str, ...]) -> None:
    """Delete all variables of the user's except ``kept``."""
    variables = main_globals()
    for name in list(variables):
        if not is_hidden(name) and name not in kept:
            del variables[name]
    variables["_"] = ""  # as in a new shell


def complete(code: str, cursor: int) -> tuple[int, int, list[str]]:
    """Return where the part that can be completed begins and ends, and the candidates for it."""
    start = cursor
    while start > 0 and (code[start - 1].isalnum() or code[start - 1] in "_."):
        start -= 1
    *path, beginning = code[start:cursor].split(".")
    variables = main_globals()
    if not path:
        names = [name for name in (*variables, *vars(builtins)) if not is_hidden(name)]
    else:
        value: Any = variables.get(path[0])
        for part in path[1:]:
            # Looked up as a plain attribute only: a property would run users' code while they type.
            value = vars(value).get(part) if hasattr(value, "__dict__") else None
        names = [] if value is None else [name for name in dir(value) if beginning.startswith("_") or name[0] != "_"]
    return cursor - len(beginning), cursor, sorted({name for name in names if name.startswith(beginning)})


def inspect(method: str, name: str, detail: int) -> dict[str, Any] | None:
    """Return what the shell of this rank knows of a name, which may have dots, or None if there is no such name."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    if shell is None or name.split(".", maxsplit=1)[0] not in main_globals():
        return None
    info: dict[str, Any] = getattr(shell, method)(name, detail_level=detail)
    return info


_MAGICS = "AutoreloadMagics"


@dataclass(frozen=True)
class Autoreload:
    """What ``%autoreload`` (mode ``0`` to ``3``) and ``%aimport`` (modules to reload or skip) were told in a shell."""

    mode: str = "0"
    chosen: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @classmethod
    def of(cls, shell: InteractiveShell) -> Autoreload:
        """Return the settings of a shell; the default where its extension was not loaded."""
        reloader: Any = getattr(shell.magics_manager.registry.get(_MAGICS), "_reloader", None)
        if not getattr(reloader, "enabled", False):
            return cls()
        mode = "1" if not reloader.check_all else "3" if getattr(reloader, "autoload_obj", False) else "2"
        return cls(mode, tuple(reloader.modules), tuple(reloader.skip_modules))


def use_autoreload(wanted: Autoreload) -> None:
    """Reload modules from now on as the notebook does. The kernel sends this in a `Call`."""
    shell: Any = get_ipython()
    if Autoreload.of(shell) == wanted:
        return
    shell.extension_manager.load_extension("autoreload")
    shell.run_line_magic("autoreload", wanted.mode)
    reloader = shell.magics_manager.registry[_MAGICS]._reloader  # noqa: SLF001 - %aimport would define names
    reloader.modules = dict.fromkeys(wanted.chosen, True)
    reloader.skip_modules = dict.fromkeys(wanted.skipped, True)
