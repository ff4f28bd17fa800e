"""Actions that other threads post to the thread of the loop."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class PostedActions:
    """A queue of actions. Any thread posts, also in a signal handler; the loop's thread runs them in their order.

    Args:
        wake: wakes up the loop's thread, which then calls `run`.

    Attributes:
        ended: set when actions that are posted will be refused.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self.ended = threading.Event()
        self._wake = wake
        self._actions: deque[tuple[Callable[[], object], Callable[[], object]]] = deque()

    def post(self, action: Callable[[], object], refuse: Callable[[], object] = lambda: None) -> None:
        """Have the loop's thread call `action`; if that thread has ended, `refuse` is called instead, in any thread."""
        self._actions.append((action, refuse))
        self._wake()
        if self.ended.is_set():  # perhaps just now: then `end` refuses it, or this does, as each is popped once
            self._refuse()

    def do(self, action: Callable[[], object], why_not: Callable[[], Exception]) -> None:
        """Have the loop's thread call `action`, and wait for it. Raises what it raises; `why_not()` if refused."""
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
        """Run the actions that were posted. For the loop's thread."""
        while self._actions:
            posted = self._actions.popleft()
            try:
                posted[0]()
            except BaseException:
                self._actions.appendleft(posted)  # it is refused when the thread ends, which ends the wait for it
                raise

    def end(self) -> None:
        """Refuse all actions in the queue, and all later ones."""
        self.ended.set()
        self._refuse()

    def _refuse(self) -> None:
        while True:
            try:
                _, refuse = self._actions.popleft()
            except IndexError:
                return
            refuse()
