"""Tell the user something that is good news or was wanted, and so no warning."""

from __future__ import annotations

import functools
import logging
import sys

from nb_accelerate.base.imported import imported

logger = logging.getLogger("nb_accelerate")


def note(line: str) -> None:
    """Show a line of information where it is not red: in the panel, or as text of the cell. A script logs it."""
    notes = getattr(sys.__stdout__, "notes", None)  # of a process that a launcher of ours has started
    find_shell = getattr(imported("IPython"), "get_ipython", None)
    if notes is not None:
        notes.write(line + "\n")
    elif find_shell is not None and find_shell() is not None:
        print(line)  # noqa: T201 - a logger writes to stderr, which notebooks show in red
    else:
        logger.warning(line)


@functools.cache
def note_once(line: str) -> None:
    """Show a line of information, the first time in this process."""
    note(line)
