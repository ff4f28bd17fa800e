"""The connections of a process, by whichever psutil is installed: all that depends on its version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil


def connections(process: psutil.Process, kind: str = "tcp") -> list[Any]:
    """Return the sockets of a process, as psutil describes them."""
    # Its name since psutil 6, which warns of the one before.
    ask: Any = getattr(process, "net_connections", None) or process.connections
    return list(ask(kind))
