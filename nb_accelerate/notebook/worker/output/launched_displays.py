"""Displays and figures of launched functions: IPython's shell, made when users' code first asks for it.

A launched function has no cell, so no shell of IPython runs it; but ``display`` and matplotlib's inline backend look
for one, and print ``Figure(640x480)`` where there is none. Making it takes some milliseconds, and most functions show
nothing: so it is made when it is looked for.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell

from nb_accelerate.base.imported import imported
from nb_accelerate.notebook.worker.shell import DisplaySender, RankShell, make_shell

if TYPE_CHECKING:
    from nb_accelerate.notebook.worker.output.displays import DisplayPort


def send_displays(port: DisplayPort) -> None:
    """Send to the notebook what a launched function displays."""
    if not InteractiveShell.initialized():
        _make_when_asked_for(port)
        return
    # This process is a fork of the kernel, and the shell the kernel's.
    RankShell.port = port
    InteractiveShell.instance().display_pub = DisplaySender(parent=None)  # type: ignore[no-untyped-call]
    _forget_figures()


def _make_when_asked_for(port: DisplayPort) -> None:
    lock = threading.RLock()  # several threads may show something first

    def initialized(_: type[InteractiveShell]) -> bool:
        with lock:
            if "initialized" in vars(InteractiveShell):
                del InteractiveShell.initialized  # the one of its base class shows again
                make_shell(port, names={})  # or its own would take the place of the function's globals
        return True

    # `display` and `get_ipython` ask this before anything else.
    InteractiveShell.initialized = classmethod(initialized)  # type: ignore[assignment, method-assign]


def show_figures() -> None:
    """Show the figures that a function has drawn and not shown, as a notebook does at the end of a cell."""
    inline: Any = imported("matplotlib_inline.backend_inline")
    if inline is not None:
        with contextlib.suppress(Exception):  # the function has returned, and its value is what matters
            inline.flush_figures()


def _forget_figures() -> None:
    """Forget the kernel's figures, which the kernel shows."""
    helpers: Any = imported("matplotlib._pylab_helpers")
    inline: Any = imported("matplotlib_inline.backend_inline")
    if helpers is not None:
        helpers.Gcf.figs.clear()
    if inline is not None:
        inline.show._draw_called = False  # noqa: SLF001 - set when the kernel drew; nothing public resets it
        inline.show._to_draw = []  # noqa: SLF001 - as above
