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


def addresses_of(process: psutil.Process) -> list[tuple[str, int]]:
    """Return the addresses and ports of a process at its ends of TCP connections."""
    return [plain_address(connection.laddr) for connection in connections(process) if connection.laddr]


def plain_address(address: tuple[str, int]) -> tuple[str, int]:
    """Return an address and port as all sockets say it: one of IPv6 writes an address of IPv4 in another way."""
    return address[0].removeprefix("::ffff:"), address[1]
