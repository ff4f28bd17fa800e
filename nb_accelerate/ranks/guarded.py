"""The output of a cell, as the pool's thread uses it: no method raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.ranks.guard import OutputGuard

if TYPE_CHECKING:
    from nb_accelerate.protocol.messages import Display
    from nb_accelerate.protocol.output import StreamName
    from nb_accelerate.ranks.request_output import CellOutput
    from nb_accelerate.ranks.sinks import Sink


class GuardedOutput:
    """A `CellOutput` whose errors cost output and nothing else; see there for what each method does.

    Args:
        output: of the cell.
        sink: where it goes; takes the line about the first error.

    Attributes:
        guard: for what else is done to show this cell's output.
        alone: see `CellOutput`.
    """

    def __init__(self, output: CellOutput, sink: Sink) -> None:
        self._output = output
        self.guard = OutputGuard(sink)
        self.alone = output.alone

    @property
    def due(self) -> float:
        """When `flush` has something to do, as `time.monotonic`."""
        due = float("inf")
        with self.guard:
            due = self._output.due
        return max(due, self.guard.retry_at)

    def text(self, rank: int, stream: StreamName, text: str) -> None:
        """Whole lines, or anything at all if the rank is alone."""
        with self.guard:
            self._output.text(rank, stream, text)

    def redrawing(self, rank: int, line: str) -> None:
        """A line that is not finished."""
        with self.guard:
            self._output.redrawing(rank, line)

    def display(self, rank: int, display: Display) -> None:
        """Something rich."""
        with self.guard:
            self._output.display(rank, display)

    def say(self, line: str) -> None:
        """A line of our own about trouble."""
        with self.guard:
            self._output.say(line)

    def note(self, line: str) -> None:
        """A line of our own about what went well."""
        with self.guard:
            self._output.note(line)

    def flush(self) -> None:
        """Pass on what has waited long enough."""
        with self.guard:
            self._output.flush()

    def finish(self) -> None:
        """The cell has ended."""
        with self.guard:
            self._output.finish()

    def close(self) -> None:
        """Nothing follows."""
        with self.guard:
            self._output.close()
