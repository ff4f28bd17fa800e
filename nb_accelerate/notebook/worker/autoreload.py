"""Reload edited modules on a rank before a cell, where the notebook does: IPython's ``%autoreload``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

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
