"""What a process forked from a kernel has in memory and must not use: the kernel's own machinery."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import io
import sys
from typing import Any


def forget_parent() -> None:
    """Make the copies of the kernel's streams, loops, pools and displays harmless in this process.

    A stream of the kernel's would send over its sockets, and can hang for ever on a lock that another thread held
    when the process forked. What is shown with ``display`` would be lost without a word.
    """
    sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = io.StringIO()  # type: ignore[misc, assignment]
    builtins.input = _no_input
    asyncio._set_running_loop(None)  # noqa: SLF001 - what asyncio offers for a forked child
    with contextlib.suppress(Exception):
        asyncio.set_event_loop(None)
    _forget_pools()
    _show_as_text()


def _no_input(_prompt: object = "", /) -> str:
    raise EOFError("a rank has no keyboard")


def _forget_pools() -> None:
    """What `multiprocessing.Process` does in a child: the parent's children and finalizers are not ours."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing._children.clear()  # noqa: SLF001 - see above
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()  # noqa: SLF001 - see above
        util._run_after_forkers()  # noqa: SLF001 - see above


def _show_as_text() -> None:
    """In a forked rank, what IPython displays is printed: the kernel's publisher belongs to the kernel."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    from IPython.core.displaypub import DisplayPublisher

    class TextPublisher(DisplayPublisher):
        def publish(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
            print(data.get("text/plain", ""))  # noqa: T201 - it is users' output

        def clear_output(self, wait: bool = False) -> None:
            pass

    shell.display_pub = TextPublisher(parent=None)  # type: ignore[no-untyped-call]
    sys.displayhook = sys.__displayhook__
    # Its thread did not survive the fork; its exit handler would wait for it.
    shell.history_manager.enabled = False
