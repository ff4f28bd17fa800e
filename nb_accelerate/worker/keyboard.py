"""Lines from whoever sits in front of the notebook, for a debugger in this rank."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from nb_accelerate.protocol.messages import Answer, Ask, GoesOn

if TYPE_CHECKING:
    from nb_accelerate.protocol.channel import Channel


class Keyboard:
    """Asks over the channel that cells come by: while one runs, nothing else is to be read there."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._asked = 0

    def ask(self, prompt: str) -> str:
        """A line, without its end.

        Raises:
            EOFError: nobody is there to answer, or this is another thread or process than the one that runs cells.
            KeyboardInterrupt: the cell is interrupted.
        """
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            raise EOFError("only the thread that runs the cell can ask for input")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._asked += 1
        self._channel.send(Ask(number=self._asked, prompt=prompt))
        while True:
            try:
                message, _ = self._channel.recv()
            except EOFError:
                os._exit(1)  # the kernel is gone; nobody is left to tell
            # An answer to what was asked before an interrupt may still have been on its way.
            if isinstance(message, Answer) and message.number == self._asked:
                if message.text is None:
                    raise EOFError("nobody is there to answer")
                return message.text

    def leave(self) -> None:
        """Say that the next question, if there is one, is not the next word of the same conversation."""
        if os.getpid() == self._pid and threading.current_thread() is threading.main_thread():
            self._channel.send(GoesOn())
