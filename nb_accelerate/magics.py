"""The IPython extension: ``%load_ext nb_accelerate`` and ``%unload_ext nb_accelerate``.

`notebook_launcher` needs no magics, so there is nothing to register. What the extension does is give the
launcher's warm processes back: they outlive a launch on purpose, and unloading ends them with the kernel left
running.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Make the kernel ready for this package; IPython calls it for ``%load_ext nb_accelerate``."""


def unload_ipython_extension(ipython: InteractiveShell) -> None:  # noqa: ARG001  (IPython's interface)
    """End every process this package keeps; IPython calls it for ``%unload_ext nb_accelerate``."""
    # Looked up, not imported: where nothing was launched there is nothing to close.
    launch = sys.modules.get("nb_accelerate.launch")
    if launch is not None:
        launch.close()
