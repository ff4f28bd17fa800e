"""The handle of a cell that runs in the background."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base import words
from nb_accelerate.base.topology.rank_lists import label
from nb_accelerate.notebook.ranks.failing.errors import summary
from nb_accelerate.notebook.ranks.steerable import Steerable
from nb_accelerate.notebook.ranks.waiting import goes_on_if_interrupted, wait

if TYPE_CHECKING:
    from types import TracebackType

    from nb_accelerate.notebook.pool.pool import Pool
    from nb_accelerate.notebook.ranks.request import Request


class CellHandle(Steerable):
    """A cell that runs on the ranks while the notebook goes on. The next cell for the ranks waits for its end.

    Attributes:
        request: the request to the ranks.
    """

    def __init__(self, pool: Pool, request: Request) -> None:
        self._pool = pool
        self.request = request
        self._began = time.monotonic()
        self._outcome: list[Any] | BaseException | None = None
        self._traceback: TracebackType | None = None

    def done(self) -> bool:
        """Return whether it has ended."""
        return self.request.done.is_set()

    @override
    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, at most `timeout` seconds, and return whether it has ended.

        Raises:
            KeyboardInterrupt: the wait was interrupted. The cell goes on.
        """
        with goes_on_if_interrupted("the cell", ends_by=".interrupt()"):
            return wait(self.request.done, timeout)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt on the ranks."""
        if not self.done():
            self._pool.interrupt()

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for its end, and return the values of the last expression, by rank.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            TimeoutError: it has not ended within `timeout` seconds. It goes on.
            KeyboardInterrupt: the wait was interrupted. The cell goes on.
            BaseException: what the cell has raised on a rank.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the cell has not ended within {timeout} s; it goes on")
        if self._outcome is None:
            try:
                self._outcome = self._pool.finish(self.request)
            except BaseException as error:  # kept for the next call
                self._outcome, self._traceback = error, error.__traceback__
        if isinstance(self._outcome, BaseException):
            # With its first traceback, because each time that it is raised frames are added.
            raise BaseException.with_traceback(self._outcome, self._traceback)
        return self._outcome

    @override
    def _steered(self) -> Request | None:
        return self.request

    def __repr__(self) -> str:
        ranks = label([rank.rank for rank in self.request.ranks])
        if not self.done():
            return f"<Cell on {ranks}: running for {words.duration(time.monotonic() - self._began)}>"
        if isinstance(self._outcome, BaseException):
            return f"<Cell on {ranks}: {summary(self._outcome)}>"
        return f"<Cell on {ranks}: {'failed; .result() raises why' if self.request.incidents else 'done'}>"
