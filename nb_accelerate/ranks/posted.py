"""What other threads want done in the loop's thread."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Posted:
    """A queue of actions. Any thread posts, also a signal handler; the loop's thread runs them.

    Args:
        wake: wakes up the loop's thread.

    Attributes:
        ended: nothing is run any more; what is posted is refused.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self.ended = threading.Event()
        self._wake = wake
        self._actions: deque[tuple[Callable[[], object], Callable[[], object]]] = deque()

    def post(self, action: Callable[[], object], refuse: Callable[[], object] = lambda: None) -> None:
        """Have something done; `refuse` is called instead if the thread has ended."""
        self._actions.append((action, refuse))
        self._wake()
        if self.ended.is_set():  # maybe just now, so that both may see what was posted: each is taken once
            self._refuse()

    def do(self, action: Callable[[], object], why_not: Callable[[], Exception]) -> None:
        """Have something done, wait until it is, and raise what it raises.

        Args:
            action: to do.
            why_not: gives what to raise if the thread has ended.
        """
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self.post(run, lambda: done.set_exception(why_not()))
        done.result()

    def run(self) -> None:
        """Do, in the loop's thread, what was posted."""
        while self._actions:
            posted = self._actions.popleft()
            try:
                posted[0]()
            except BaseException:
                self._actions.appendleft(posted)  # whoever waits for it is told when the thread ends
                raise

    def end(self) -> None:
        """Refuse what was posted and what will be."""
        self.ended.set()
        self._refuse()

    def _refuse(self) -> None:
        while True:
            try:
                _, refuse = self._actions.popleft()
            except IndexError:
                return
            refuse()
