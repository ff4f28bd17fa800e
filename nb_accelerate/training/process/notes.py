"""Say something to the user that is no warning."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("nb_accelerate")


def note(line: str) -> None:
    """Show a line in the notebook that has started this process, which does not draw it in red; else log it."""
    for_all = getattr(sys.stdout, "for_all", None)  # of a process that a launcher of ours has started
    if for_all is None:
        logger.warning(line)
    else:
        for_all.write(line + "\n")
