"""Start ranks from a notebook, watch them, and end them.

Names are imported when they are first used: the warm server can be started without the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nb_accelerate.notebook.launch.hosts import close
    from nb_accelerate.notebook.launch.launch import Launch
    from nb_accelerate.notebook.launch.launcher import notebook_launcher
    from nb_accelerate.notebook.ranks.status import RankStatus

__all__ = ["Launch", "RankStatus", "close", "notebook_launcher"]

_HOME = {"Launch": "launch", "close": "hosts", "RankStatus": "launch", "notebook_launcher": "launcher"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name == "notebook_launcher":
        importlib.import_module(f"{__name__}.launcher").warm_up_in_kernel()
    globals()[name] = value  # found without this function from now on
    return value
