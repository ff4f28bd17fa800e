"""Look at a module that this process may have imported, without importing it."""

from __future__ import annotations

import sys
from typing import Any


def imported(name: str) -> Any:
    """Return a module; None if nobody has imported it yet.

    While another thread imports it, attributes of it may be missing.
    """
    return sys.modules.get(name)
