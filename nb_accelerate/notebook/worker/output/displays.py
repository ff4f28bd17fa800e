"""Send what a rank displays to the kernel, in its order among what is printed.

The data goes over the channel, an empty frame into the output pipe. The data is sent first, so that the reader of
the frame finds the data waiting. Frames and data keep one order, also with several threads.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.protocol.messages import Display
from nb_accelerate.notebook.protocol.output import frame

if TYPE_CHECKING:
    from nb_accelerate.notebook.protocol.channel import Channel


class DisplayPort:
    """Sends displays of this process to the kernel."""

    def __init__(self, channel: Channel, mark: bytes) -> None:
        self._channel = channel
        self._mark = mark
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def show(self, kind: str, content: dict[str, Any]) -> None:
        """Send the content of a Jupyter message."""
        if os.getpid() != self._pid:  # a loader's worker: the channel is not its own
            print((content.get("data") or {}).get("text/plain", ""))  # noqa: T201 - it is users' output
            return
        text = json.dumps(content, default=_encode, skipkeys=True)
        with self._lock:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self._channel.send(Display(kind=kind, content=text))
            os.write(1, frame(self._mark, b"", "display"))


def _encode(value: object) -> object:
    """Return what JSON can hold in the place of an object: base64 for bytes, such as an image, else its text."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    return str(value)
