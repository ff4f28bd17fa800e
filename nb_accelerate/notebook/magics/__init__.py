"""The IPython extension: ``%load_ext nb_accelerate`` and ``%unload_ext nb_accelerate``.

Loading registers magics and imports nothing heavy. In the background it starts the process that ranks are forked
from, which takes some seconds to import PyTorch, so that the first cell for the ranks need not wait for it.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from nb_accelerate.base.config.env import SESSION_DEFAULTS, Environment
from nb_accelerate.base.config.versions import check_versions
from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.magics.auto import AutoMode
from nb_accelerate.notebook.magics.cells import Cells, plain_errors
from nb_accelerate.notebook.magics.commands import Commands
from nb_accelerate.notebook.magics.names import RankNames

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension", "unload_ipython_extension"]


_CELL_MAGICS = ("distributed", "rank", "local")


class _Extension:
    """The extension in one kernel: what magics share between cells. `register`, then `unregister`."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._auto = AutoMode(shell)
        self._names = RankNames(shell, self._auto)
        self._cells = cells = Cells(shell, self._auto, SESSION_DEFAULTS)
        self._callbacks: dict[str, Callable[..., object]] = {
            "pre_run_cell": cells.begin_cell,
            "post_execute": cells.end_callback,
            "post_run_cell": cells.end_cell,
        }

    def register(self) -> None:
        """Add the magics, or replace them."""
        cells = self._cells
        commands = Commands(self._shell, self._auto, SESSION_DEFAULTS)
        manager = self._shell.magics_manager
        manager.register_function(cells.distributed, magic_kind="cell", magic_name="distributed")
        manager.register_function(cells.rank, magic_kind="cell", magic_name="rank")
        manager.register_function(cells.local, magic_kind="cell", magic_name="local")
        manager.register_function(commands.run, magic_kind="line", magic_name="distributed")
        for name in _CELL_MAGICS:  # the line magic that IPython looks for when the line is not the first
            manager.register_function(_misplaced(name), magic_kind="line", magic_name=f"%{name}")
        self._auto.register()
        self._names.register()
        for event, callback in self._callbacks.items():
            self._shell.events.register(event, callback)
        if Environment().keep_warm:
            from nb_accelerate.notebook.launch.servers import warm_server

            warm_server()  # it imports PyTorch meanwhile; nobody waits for that here

    def unregister(self) -> None:
        """Take everything back, and end the ranks."""
        self._auto.unregister()
        self._names.unregister()
        for event, callback in self._callbacks.items():
            with contextlib.suppress(ValueError):
                self._shell.events.unregister(event, callback)
        SESSION_DEFAULTS.clear()
        of_lines = ("distributed", *(f"%{name}" for name in _CELL_MAGICS))
        for kind, names in (("cell", _CELL_MAGICS), ("line", of_lines)):
            for name in names:
                self._shell.magics_manager.magics[kind].pop(name, None)
        from nb_accelerate.notebook import pool

        pool.stop()


def _misplaced(name: str) -> Callable[[str], None]:
    """Return a line magic that says where a cell magic belongs."""

    @plain_errors()
    def misplaced(line: str) -> None:
        raise ConfigError(
            f"%%{name} has to be the first line of its cell, above comments too: nothing ran on the ranks. Move "
            f"`{f'%%{name} {line}'.rstrip()}` there."
        )

    return misplaced


_extensions: dict[int, _Extension] = {}


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Make the kernel ready for this package; IPython calls it for ``%load_ext nb_accelerate``.

    Raises:
        MissingDependencyError: a package of the kernel is too old.
    """
    if getattr(ipython, "is_rank", False):  # auto mode runs a whole notebook on the ranks, this line too
        return
    check_versions()
    extension = _extensions[id(ipython)] = _Extension(ipython)
    extension.register()


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """End every process this package keeps; IPython calls it for ``%unload_ext nb_accelerate``."""
    extension = _extensions.pop(id(ipython), None)
    if extension is not None:
        extension.unregister()
    # Looked up, not imported: where nothing was launched there is nothing to close.
    launch = sys.modules.get("nb_accelerate.notebook.launch")
    if launch is not None:
        launch.close()
