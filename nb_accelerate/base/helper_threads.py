"""The threads of this package, beside those in which users' code runs. None of them fails in silence.

Somebody waits for what such a thread does, and would wait for ever. So what it raises goes to its ``on_failure``, or
else to what `tell_failures` was given (a rank tells its kernel; a process that starts ranks ends), or is printed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable

    OnFailure = Callable[[str, BaseException], object]


class HelperThread(threading.Thread):
    """A daemon thread whose exception is told to ``on_failure``, in that thread, with the thread's name."""

    def __init__(
        self, target: Callable[..., object], *args: Any, name: str, on_failure: OnFailure | None = None
    ) -> None:
        # A daemon, since it may wait for what never comes, as the answer of a machine without network: Python joins all
        # other threads before it ends.
        super().__init__(target=target, args=args, name=f"nb_accelerate-{name}", daemon=True)
        self._on_failure = on_failure

    @override
    def run(self) -> None:
        try:
            super().run()
        # Of SystemExit, too, which ends a thread without a word, and which users' code may raise in it.
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
