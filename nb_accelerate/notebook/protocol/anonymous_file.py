"""Files without a name: no other process can open one unless it is given a descriptor."""

from __future__ import annotations

import contextlib
import os
import tempfile


def anonymous_file() -> int:
    """Return a descriptor of a new file without a name, which is gone when its last descriptor is closed."""
    # It is in memory where the system can do that and lets this process do it, else in the folder for temporary files.
    with contextlib.suppress(AttributeError, OSError):  # not on macOS; refused by some sandboxes
        return os.memfd_create("nb_accelerate", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
