"""The debugger of a rank: ``%debug`` after a cell that failed, ``breakpoint()`` in a cell or a launched function."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from IPython.core.debugger import Pdb
from typing_extensions import override

from nb_accelerate.notebook.protocol.messages import DebuggerResumed, InputReply, InputRequest

if TYPE_CHECKING:
    from nb_accelerate.notebook.protocol.channel import Channel

_PROMPT = "ipdb> "


class InputRequests:
    """Asks the user for lines, over the channel that cells and calls come by. Nothing else arrives while one runs."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._asked = 0

    def ask(self, prompt: str) -> str:
        """Return the line that the user typed, without its end.

        Raises:
            EOFError: nobody is there to answer, or this is another thread or process than the one that runs cells.
        """
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            raise EOFError("only the thread that runs the cell can ask for input")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._asked += 1
        self._channel.send(InputRequest(number=self._asked, prompt=prompt))
        while True:
            try:
                message, _ = self._channel.recv()
            except EOFError:
                os._exit(1)  # the kernel is gone; nobody is left to tell
            # An answer to what was asked before an interrupt may still have been on its way.
            if isinstance(message, InputReply) and message.number == self._asked:
                if message.text is None:
                    raise EOFError("nobody is there to answer")
                return message.text

    def leave(self) -> None:
        """Report that the debugger let the code go on: the next line it asks for belongs to another stop."""
        if os.getpid() == self._pid and threading.current_thread() is threading.main_thread():
            self._channel.send(DebuggerResumed())


class RankDebugger(Pdb):
    """IPython's debugger. The user types its commands in the notebook."""

    requests: InputRequests

    def __init__(self, **options: Any) -> None:
        # It must not keep SIGINT after `continue`: a later interrupt would open it again, and not end the cell.
        super().__init__(stdin=_Commands(self.requests), stdout=sys.stdout, nosigint=True, **options)
        self.use_rawinput = False
        self.prompt = ""  # it is shown with the question, at the place where the user types

    @override
    def interaction(self, *args: Any) -> None:
        try:
            super().interaction(*args)  # type: ignore[no-untyped-call]
        finally:
            self.requests.leave()


class _Commands:
    """The standard input of a debugger."""

    def __init__(self, requests: InputRequests) -> None:
        self._requests = requests

    def readline(self) -> str:
        """Return the next command; "" if there will be none, which ends the debugger."""
        try:
            return self._requests.ask(_PROMPT) + "\n"
        except (EOFError, KeyboardInterrupt):  # pdb answers an interrupt by asking again; this one ends the cell
            return ""


def debug_with(requests: InputRequests) -> None:
    """Let ``breakpoint()`` stop in a debugger from now on."""
    RankDebugger.requests = requests
    sys.breakpointhook = _set_breakpoint


def _set_breakpoint(*_: Any, **__: Any) -> None:
    RankDebugger().set_trace(sys._getframe(1))  # type: ignore[no-untyped-call] # noqa: SLF001 - as pdb.set_trace does
