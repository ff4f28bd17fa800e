"""See which line of users' code runs."""

from __future__ import annotations

import sys
import traceback

from nb_accelerate.errors.traceback_lines import is_users


def line_here() -> int:
    """Return the line of users' code that runs; 0 if there is none."""
    stack = traceback.walk_stack(sys._getframe(1))  # noqa: SLF001 - as `warnings` does
    return next((frame.f_lineno for frame, _ in stack if is_users(frame.f_code.co_filename)), 0)
