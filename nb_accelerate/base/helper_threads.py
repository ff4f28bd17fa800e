"""The threads of this package, beside those in which users' code runs. None of them fails in silence.

Somebody waits for what such a thread does: a kernel for a rank, ranks for one another. One that ended without a word
would leave them waiting for ever. So what it raises is told, in this order of precedence::

    HelperThread(on_failure=...)    its owner keeps the exception, and raises it where the thread is waited for
    tell_failures(...)              this process has one answer to all of them: a rank tells its kernel, which ends the
                                    rank; a process that starts ranks ends
    threading.excepthook            elsewhere Python prints the traceback
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable

    OnFailure = Callable[[str, BaseException], object]


class HelperThread(threading.Thread):
    """A daemon thread whose exception is told.

    Args:
        args: of `target`.
        name: what it is for, in a word.
        on_failure: takes the name of the thread and what it has raised, in that thread.
    """

    def __init__(
        self, target: Callable[..., object], *args: Any, name: str, on_failure: OnFailure | None = None
    ) -> None:
        super().__init__(target=target, args=args, name=f"nb_accelerate-{name}", daemon=True)
        self._on_failure = on_failure

    @override
    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:
            tell = self._on_failure or _of_process
            if tell is None:
                raise
            tell(self.name, error)


_of_process: OnFailure | None = None


def tell_failures(on_failure: OnFailure) -> None:
    """Set what becomes, in this process, of exceptions of helper threads that have no answer of their own."""
    global _of_process  # noqa: PLW0603 - the process has one
    _of_process = on_failure
