"""From what ranks print to the sink: prefixes and folding, once for a launch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from nb_accelerate.launch.fold import Fold
from nb_accelerate.ranks.guard import OutputGuard
from nb_accelerate.ranks.output import RankOutput, prefixed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.launch.local import RankHandle
    from nb_accelerate.protocol.output import StreamName
    from nb_accelerate.ranks.sinks import Sink


class Router:
    """The outputs of a launch's ranks, and where they go. An error on the way there costs output: nothing here raises.

    Args:
        handles: the ranks.
        sink: takes lines.
        template: line prefix, see `prefixed`.
        fold: show equal lines of all ranks once.

    Attributes:
        outputs: one for each handle, in order.
        guard: for what else is done to show the output of this launch.
    """

    def __init__(
        self, handles: Sequence[RankHandle], sink: Sink, *, template: str | None = None, fold: bool = False
    ) -> None:
        self._sink = sink
        self.guard = OutputGuard(sink)
        self._template = template
        several = len(handles) > 1
        self._fold = Fold([handle.rank for handle in handles], sink.write) if fold and several else None
        # A prefix belongs in front of whole lines, so then nothing is passed on before a line is complete.
        alone = not several and template is None
        self.outputs = [
            RankOutput(handle.mark, functools.partial(self._emit, handle), alone=alone) for handle in handles
        ]

    @property
    def due(self) -> float:
        """When `flush` has something to do, as `time.monotonic`."""
        due = float("inf")
        with self.guard:
            due = min(self._sink.due, self._fold.due if self._fold else float("inf"))
        return max(due, self.guard.retry_at)

    def feed(self, output: RankOutput, data: bytes) -> None:
        """Bytes of a rank's main pipe, for one of `outputs`."""
        with self.guard:
            output.feed(data)

    def feed_stderr(self, output: RankOutput, data: bytes) -> None:
        """Bytes that C code of a rank wrote to descriptor 2, for one of `outputs`."""
        with self.guard:
            output.feed_stderr(data)

    def flush(self) -> None:
        """Pass on what has been held back long enough."""
        with self.guard:
            if self._fold:
                self._fold.flush()
        with self.guard:
            self._sink.flush()

    def finish(self) -> None:
        """All ranks have ended."""
        for output in self.outputs:
            self.end(output)
        with self.guard:
            if self._fold:
                self._fold.flush(everything=True)
        with self.guard:
            self._sink.flush()

    def end(self, output: RankOutput) -> None:
        """The rank of one of `outputs` has ended."""
        with self.guard:
            output.finish()

    def say(self, line: str) -> None:
        """A line of our own."""
        with self.guard:
            self._sink.write("stderr", line + "\n")

    def _emit(self, handle: RankHandle, stream: StreamName, text: str) -> None:
        with self.guard:  # here, so that what comes behind it in the same lump is shown
            if self._fold:
                self._fold.add(handle.rank, stream, text)
            else:
                self._sink.write(stream, prefixed(text, self._template, rank=handle.rank, local_rank=handle.local_rank))
