"""Register the magics in a kernel, and hold what they share between cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.session_defaults import SESSION_DEFAULTS
from nb_accelerate.notebook.magics.auto import AutoMode
from nb_accelerate.notebook.magics.cells import Cells
from nb_accelerate.notebook.magics.commands import Commands
from nb_accelerate.notebook.magics.names import RankNames
from nb_accelerate.notebook.magics.seeding import Seeding

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Session:
    """One extension in one kernel. `register`, then `unregister`."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._auto = AutoMode(shell)
        self._names = RankNames(shell, self._auto)
        self._seeding = Seeding(shell, self._auto)

    def register(self) -> None:
        """Add the magics; take the place of those that are there."""
        cells = Cells(self._shell, self._auto, self._seeding, SESSION_DEFAULTS)
        commands = Commands(self._shell, self._auto, SESSION_DEFAULTS)
        manager = self._shell.magics_manager
        manager.register_function(cells.distributed, magic_kind="cell", magic_name="distributed")
        manager.register_function(cells.rank, magic_kind="cell", magic_name="rank")
        manager.register_function(cells.local, magic_kind="cell", magic_name="local")
        manager.register_function(commands.run, magic_kind="line", magic_name="distributed")
        self._auto.register()
        self._names.register()
        self._seeding.register()
        if Environment().keep_warm:
            from nb_accelerate.notebook.launch.servers import warm_server

            warm_server()  # it imports PyTorch meanwhile; nobody waits for that here

    def unregister(self) -> None:
        """Take everything back, and end the ranks."""
        self._auto.unregister()
        self._names.unregister()
        self._seeding.unregister()
        SESSION_DEFAULTS.clear()
        for kind, names in (("cell", ("distributed", "rank", "local")), ("line", ("distributed",))):
            for name in names:
                self._shell.magics_manager.magics[kind].pop(name, None)
        from nb_accelerate.notebook import pool

        pool.stop()
