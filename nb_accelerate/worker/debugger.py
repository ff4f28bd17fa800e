"""The debugger of a rank: ``%debug`` after a cell that failed, and ``breakpoint()`` in a cell."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from IPython.core.debugger import Pdb
from typing_extensions import override

if TYPE_CHECKING:
    from nb_accelerate.worker.keyboard import Keyboard

_PROMPT = "ipdb> "


class RankDebugger(Pdb):
    """IPython's debugger; its commands come from the notebook's keyboard."""

    keyboard: Keyboard

    def __init__(self, **options: Any) -> None:
        super().__init__(None, _Lines(self.keyboard), sys.stdout, **options)
        self.use_rawinput = False
        self.prompt = ""  # it is shown with the question, at the place where the user types

    @override
    def interaction(self, *args: Any) -> None:
        try:
            super().interaction(*args)  # type: ignore[no-untyped-call]
        finally:
            self.keyboard.leave()


class _Lines:
    """A file to read commands from."""

    def __init__(self, keyboard: Keyboard) -> None:
        self._keyboard = keyboard

    def readline(self) -> str:
        """The next command; nothing where there will be none, which ends the debugger."""
        try:
            return self._keyboard.ask(_PROMPT) + "\n"
        except (EOFError, KeyboardInterrupt):  # pdb answers an interrupt by asking again; this one ends the cell
            return ""


def set_breakpoint(*_: Any, **__: Any) -> None:
    """What ``breakpoint()`` calls."""
    RankDebugger().set_trace(sys._getframe(1))  # type: ignore[no-untyped-call] # noqa: SLF001 - as pdb.set_trace does
