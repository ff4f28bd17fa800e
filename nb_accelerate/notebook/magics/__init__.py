"""The IPython extension: ``%load_ext nb_accelerate`` and ``%unload_ext nb_accelerate``.

Loading registers magics and imports nothing heavy. In the background it starts the process that ranks are forked
from, which takes some seconds to import PyTorch, so that the first cell for the ranks need not wait for it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from nb_accelerate.base.config.versions import check_versions
from nb_accelerate.notebook.magics.session import Session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension", "unload_ipython_extension"]

_sessions: dict[int, Session] = {}


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Make the kernel ready for this package; IPython calls it for ``%load_ext nb_accelerate``.

    Raises:
        MissingDependencyError: a package of the kernel is too old.
    """
    if getattr(ipython, "is_rank", False):  # auto mode runs a whole notebook on the ranks, this line too
        return
    check_versions()
    session = _sessions[id(ipython)] = Session(ipython)
    session.register()


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """End every process this package keeps; IPython calls it for ``%unload_ext nb_accelerate``."""
    session = _sessions.pop(id(ipython), None)
    if session is not None:
        session.unregister()
    # Looked up, not imported: where nothing was launched there is nothing to close.
    launch = sys.modules.get("nb_accelerate.notebook.launch")
    if launch is not None:
        launch.close()
