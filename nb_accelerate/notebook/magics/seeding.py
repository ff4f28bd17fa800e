"""Notice cells of the notebook that seed random numbers after the ranks were started: the seed is for them as well."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nb_accelerate.notebook.magics.auto import AutoMode
    from nb_accelerate.notebook.pool.pool import Pool

_SEEDS = re.compile(r"seed\w*\s*\(")
"""``torch.manual_seed(0)``, ``np.random.seed(0)``, ``set_seed(0)``, ``seed_everything(0)`` ... States are not compared:
when the same seed is set again, the state can be equal to the one that ranks began with."""


class Seeding:
    """Sends ranks the states of the notebook's random numbers once a cell has seeded them; `register`, `unregister`."""

    def __init__(self, shell: InteractiveShell, auto: AutoMode) -> None:
        self._shell = shell
        self._auto = auto
        self._is_news = False

    def register(self) -> None:
        """Look at the cells of the shell from now on."""
        self._shell.events.register("post_run_cell", self._look)

    def unregister(self) -> None:
        """Look at them no longer."""
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("post_run_cell", self._look)

    def _look(self, result: Any) -> None:
        cell = result.info.raw_cell or ""
        seeds = any(_SEEDS.search(line.partition("#")[0]) for line in cell.splitlines())
        if seeds and self._auto.runs_here(cell):
            self._is_news = True

    def send(self, pool: Pool) -> None:
        """Send the states to ranks that are idle and have not got them."""
        if self._is_news:
            from nb_accelerate.notebook.protocol.random_states import RandomStates

            pool.call(RandomStates.here().use)
            self._is_news = False

    def sent(self) -> None:
        """Note that ranks have just been started, with the states as they are."""
        self._is_news = False
