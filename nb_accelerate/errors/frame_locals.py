"""Read the local variables of a function that runs, without keeping what they refer to."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

_UNSHARED = 3
"""References to a dict that only a frame has: its own, that of the name here, and that of the call that counts."""


def locals_of(frame: FrameType) -> Mapping[str, Any]:
    """Return the local variables of a frame.

    Before Python 3.13 ``frame.f_locals`` of a function is a dict that its frame keeps: models that the function has
    dropped since would stay until it returns. The dict is emptied, unless the user has it too, from ``locals()``.
    """
    found = frame.f_locals
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED or type(found) is not dict:
        return found  # of a module; or a view, from Python 3.13 on
    names = dict(found)
    if sys.getrefcount(found) <= _UNSHARED:
        found.clear()
    return names
