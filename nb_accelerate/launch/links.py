"""Connections between the launchers of several machines: lines of JSON over sockets that never block."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

_MAX_LINE = 1 << 24
"""Bytes of one line; a longer one ends the connection."""

_PIECE = 1 << 16
"""Bytes that are read at once."""

_CONNECT_LIMIT = 2.0
"""Seconds of one attempt to connect."""

_RETRY_INTERVAL = 0.2
"""Seconds between two attempts to connect."""


class Link:
    """A connection to another machine. `close` it.

    Args:
        socket_: connected; it is then this object's.

    Attributes:
        heard: `time.monotonic` of the last line.
    """

    def __init__(self, socket_: socket.socket) -> None:
        socket_.setblocking(False)
        self._socket = socket_
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.heard = time.monotonic()

    def fileno(self) -> int:
        """Return the descriptor, to wait for."""
        return self._socket.fileno()

    @property
    def is_sending(self) -> bool:
        """Whether a part of a line is left to be sent."""
        return bool(self._outgoing)

    def write(self, line: dict[str, Any]) -> None:
        """Send a line, or nothing if the other machine has not read the last one: it gets a newer one when it does.

        Raises:
            OSError: the connection has ended.
        """
        if not self._outgoing:
            self._outgoing += json.dumps(line).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is left and can be sent.

        Raises:
            OSError: the connection has ended.
        """
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            pass

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that have come.

        Raises:
            OSError: the connection has ended.
            ValueError: what has come is not JSON.
        """
        try:
            piece = self._socket.recv(_PIECE)
        except BlockingIOError:
            return []
        self._incoming += piece
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming = bytearray(rest)
        if not piece or len(rest) > _MAX_LINE:
            raise ConnectionError("the connection has ended")
        if lines:
            self.heard = time.monotonic()
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def connect_until(place: tuple[str, int], deadline: float) -> socket.socket:
    """Connect to a machine that may not listen yet.

    Args:
        place: its address and port.
        deadline: until when, as `time.monotonic`.

    Raises:
        OSError: why the last attempt failed.
    """
    while True:
        try:
            return socket.create_connection(place, timeout=_CONNECT_LIMIT)
        except OSError:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            time.sleep(min(_RETRY_INTERVAL, left))  # nothing tells when somebody begins to listen there
